"""Seconds from nothing to the first answer, with empty caches.

    python3 -m bench.first_minutes

The last commit of this tree is cloned; `make serve ONCE=1` runs twice; then its wheel is installed
into an environment outside of the clone, and `pagewire up --once` runs twice. Needs git, make and a
package index, and no library. Exits with 1 if a command fails, or if the first start from a clone
takes more than 90 s or the second more than 15 s: what a plain host of two cores has with a
mirror of the index nearby.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.first_minutes import fresh
from bench.harness.records import new_parser

ANSWER = "Tokyo"
PORTS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
SERVE = "make serve ONCE=1 OPTIONS='{ports}'"
UP = "pagewire up --once {ports}"


@dataclass(frozen=True, slots=True)
class Time:
    """The time that something took."""

    what: str
    seconds: float
    limit_s: float | None = None

    @property
    def is_met(self) -> bool:
        """True if it is within its limit."""
        return self.limit_s is None or self.seconds <= self.limit_s

    def __str__(self) -> str:
        verdict = "" if self.is_met else ", MISSED"
        limit = "" if self.limit_s is None else f"  (at most {self.limit_s:.0f} s{verdict})"
        return f"{self.what:<44}{self.seconds:>7.1f} s{limit}"


def ports() -> str:
    """Options with ports that nothing listens on now."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in PORTS]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        numbers = [probe.getsockname()[1] for probe in probes]
    return " ".join(f"{name} {number}" for name, number in zip(PORTS, numbers, strict=True))


def answered(done: fresh.Done) -> float:
    """Its seconds. Raises StepFailed if the answer is not in its output."""
    sys.stdout.write("".join(f"  | {line}\n" for line in done.output.splitlines()))
    sys.stdout.flush()
    if ANSWER not in done.output:
        raise fresh.StepFailed(f"no answer with {ANSWER!r}")
    return done.seconds


def from_a_clone() -> list[Time]:
    """`make serve` in a fresh clone, and again."""
    with fresh.folder() as home:
        variables = fresh.environment(home)
        clone = fresh.clone(home, variables)
        first = answered(fresh.run(SERVE.format(ports=ports()), clone, variables))
        second = answered(fresh.run(SERVE.format(ports=ports()), clone, variables))
    return [
        Time("fresh clone, make serve to the answer", first, 90),
        Time("the second start", second, 15),
    ]


def from_a_wheel() -> list[Time]:
    """`pip install` of the wheel, outside any checkout, and `pagewire up`."""
    with fresh.folder() as home:
        variables = fresh.environment(home)
        wheel = fresh.build_wheel(home, variables)
        install = (
            f"python3 -m venv .venv && pip install -qq -c clone/constraints.txt "
            f"'{wheel}[serve]' && rm -rf clone"
        )
        installed = fresh.run(install, home, variables)
        first = answered(fresh.run(UP.format(ports=ports()), home, variables))
        second = answered(fresh.run(UP.format(ports=ports()), home, variables))
    return [
        Time("pip install of the wheel with [serve]", installed.seconds),
        Time("pagewire up to the answer", first),
        Time("the second start of the wheel", second),
    ]


def main(arguments: Sequence[str]) -> int:
    """Prints what the commands say, then all times."""
    parser = new_parser("bench.first_minutes", __doc__)
    parser.parse_args(arguments)
    load = os.getloadavg()[0]
    try:
        times = [*from_a_clone(), *from_a_wheel()]
    except fresh.StepFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    cores = len(os.sched_getaffinity(0))
    sys.stdout.write(f"\n{cores} cores, load before {load:.1f}\n")
    sys.stdout.write("".join(f"{time}\n" for time in times))
    return 0 if all(time.is_met for time in times) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
