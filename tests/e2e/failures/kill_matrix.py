"""Kills and stops services under `pagewire up` while clients stream, and compares every text.

    python -m tests.e2e.failures.kill_matrix [--streams 32] [--repetitions 10] [--model DIR]

In each round so many streams run over HTTP and as many through the SDK: greedy, seeded, penalized,
ruled by a grammar, and of two outputs. Once all have begun, at a random moment, a service is killed
(SIGKILL), stopped (SIGSTOP) or asked to end (SIGTERM), or all three are killed. Rounds come in
random order, by the seed.
Every text is compared with that of its twin, the same request undisturbed. The exit status is 1 if
a stream was lost or differs; that a killed gateway cuts its HTTP streams is what it has to do.
"""

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.checkpoints import temporary
from bench.harness.services import commit, hardware
from default_model.folder import ensure
from tests.e2e.failures.supervised import SERVICES, ReadyWatch, Supervised
from tests.e2e.failures.twins import Seen, Streams, TwinRequest, Verdict, asks

LATEST = 0.8  # of all text has been shown when the victim is hit
MOST_MISSED = 3  # times that all streams ended before the victim was hit
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


@dataclass(slots=True)
class Cell:
    """A harm of some rounds, and the verdicts of its streams."""

    victims: tuple[str, ...]
    how: str  # a key of SIGNALS
    verdicts: dict[bool, Counter[Verdict]] = field(  # by whether it was over HTTP
        default_factory=lambda: {True: Counter(), False: Counter()}
    )
    ready_after_s: list[float] = field(default_factory=list)
    num_running: int = 0  # streams when the victim was hit, of all rounds

    @property
    def name(self) -> str:
        """As in --cells."""
        return f"{'all' if len(self.victims) > 1 else self.victims[0]}-{self.how}"

    @property
    def num_lost(self) -> int:
        """Streams that had to end as their twin and did not."""
        return sum(
            count
            for over_http, counts in self.verdicts.items()
            for verdict, count in counts.items()
            if not self.allows(verdict, over_http)
        )

    def allows(self, verdict: Verdict, over_http: bool) -> bool:
        """True if a stream may end so: a gateway that is lost cuts those over HTTP."""
        is_lost = "gateway" in self.victims and self.how != "term"
        return verdict is Verdict.SAME or (verdict is Verdict.CUT and over_http and is_lost)

    def row(self) -> str:
        """Its line of the table."""
        http, sdk = (self.verdicts[over_http] for over_http in (True, False))
        after_s = self.ready_after_s
        numbers = [
            len(after_s),
            self.num_running,
            http[Verdict.SAME],
            http[Verdict.CUT],
            http[Verdict.ERROR] + http[Verdict.DIFFERENT],
            sdk[Verdict.SAME],
            sdk.total() - sdk[Verdict.SAME],
            f"{statistics.median(after_s):.1f}, {max(after_s):.1f}" if after_s else "",
        ]
        who = "all three" if len(self.victims) > 1 else self.victims[0]
        return f"| {who} | SIG{self.how.upper()} | " + " | ".join(map(str, numbers)) + " |"


COLUMNS = (
    *("service", "signal", "rounds", "streams hit", "HTTP: same text", "cut", "lost or different"),
    *("SDK: same text", "lost or different", "ready again after s: median, most"),
)


def all_cells() -> list[Cell]:
    """The whole matrix."""
    single = [Cell((name,), how) for how in SIGNALS for name in SERVICES]
    return [*single, Cell(SERVICES, "kill")]


class Matrix:
    """One product, its requests and their twins."""

    def __init__(
        self, product: Supervised, requests: list[TwinRequest], rng: random.Random
    ) -> None:
        self._product = product
        self._requests = requests
        self._rng = rng
        self.twins = self._undisturbed()  # with an empty prefix cache
        again = self._undisturbed()
        unequal = [ask.kind for ask, verdict in zip(requests, self.judge(again), strict=True)
                   if verdict is not Verdict.SAME]  # fmt: skip
        if unequal:
            raise SystemExit(f"undisturbed streams differ from one another: {unequal}")

    def _start(self) -> Streams:
        ports = self._product.ports
        return Streams(self._requests, ports.gateway_http, ports.gateway_grpc)

    def _undisturbed(self) -> list[Seen]:
        seen = self._start().wait()
        problems = [one.problem for one in seen if one.problem]
        if problems:
            raise SystemExit(f"an undisturbed stream failed: {problems[0]}")
        return seen

    def judge(self, seen: Sequence[Seen]) -> list[Verdict]:
        """Verdicts of all streams."""
        return [one.judge(twin) for one, twin in zip(seen, self.twins, strict=True)]

    def _at_random_moment(self) -> Streams:
        share = self._rng.uniform(0.0, LATEST)
        for _ in range(MOST_MISSED):
            streams = self._start()
            streams.wait_until_all_have_begun()
            streams.wait_for_share(share, self.twins)
            if streams.num_running:
                return streams
            streams.wait()
        raise SystemExit("the streams end before a service can be hit: more --tokens")

    def round(self, cell: Cell) -> None:
        """Disturbs fresh streams once, and adds what came of it to the cell."""
        streams = self._at_random_moment()
        cell.num_running += streams.num_running
        pids = {victim: self._product.pid(victim) for victim in cell.victims}
        watch = ReadyWatch(self._product)
        for pid in pids.values():
            assert pid is not None
            os.kill(pid, SIGNALS[cell.how])
        watch.start()
        seen = streams.wait()
        while any(self._product.pid(victim) in (None, pid) for victim, pid in pids.items()):
            time.sleep(0.05)
        self._product.wait_until_whole()
        cell.ready_after_s.append(watch.stop())
        for ask, one, verdict in zip(self._requests, seen, self.judge(seen), strict=True):
            cell.verdicts[ask.over_http][verdict] += 1
            if not cell.allows(verdict, ask.over_http):
                where = "HTTP" if ask.over_http else "SDK"
                print(f"{cell.name}: {ask.kind} over {where}: {verdict.value}: {one.problem}")


@contextlib.contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """The given model, or a tiny one with random weights and the default model's tokenizer."""
    if given is not None:
        yield given
        return
    with temporary("tiny-chat") as folder:
        for name in TOKENIZER:
            shutil.copy(ensure() / name, folder)
        yield folder


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.failures.kill_matrix", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--streams", type=int, default=32, help="over HTTP, and as many through the SDK")
    add("--repetitions", type=int, default=10, help="rounds per service and signal")
    add("--minutes", type=float, default=math.inf, help="begin no round after so long")
    add("--tokens", type=int, default=256, help="tokens per output")
    add("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add("--model", type=Path, metavar="DIR", help="model folder (default: a tiny random one)")
    add("--dtype", default="float32", help="type of weights and activations")
    add("--cells", default="", metavar="NAMES", help="only these, as gateway-kill,worker-stop")
    add("--up-options", default="", metavar="WORDS", help="further options of pagewire up")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a stream was lost or differs, or the end was not clean."""
    options = parse(arguments)
    names = options.cells.split(",") if options.cells else [cell.name for cell in all_cells()]
    cells = [cell for cell in all_cells() if cell.name in names]
    if len(cells) != len(names):
        raise SystemExit(f"--cells: {options.cells}; known are {[c.name for c in all_cells()]}")
    rng = random.Random(options.seed)
    rounds = [cell for cell in cells for _ in range(options.repetitions)]
    rng.shuffle(rounds)
    print(f"seed {options.seed}, commit {commit()}, {hardware()}", flush=True)
    with model_folder(options.model) as model:
        words = ("--dtype", options.dtype, *options.up_options.split())
        with Supervised(model, words) as product:
            matrix = Matrix(product, asks(options.streams, options.tokens), rng)
            end_s = time.monotonic() + options.minutes * 60.0
            for number, cell in enumerate(rounds, 1):
                if time.monotonic() > end_s:
                    break
                matrix.round(cell)
                after_s = cell.ready_after_s[-1]
                print(
                    f"{number}/{len(rounds)} {cell.name}: ready after {after_s:.1f} s", flush=True
                )
            status = product.stop()
    rule = "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)
    print("\n".join(["", f"| {' | '.join(COLUMNS)} |", rule, *(cell.row() for cell in cells)]))
    num_lost = sum(cell.num_lost for cell in cells)
    print(f"\n{num_lost} lost or different; pagewire up ended with status {status}")
    return int(num_lost > 0 or status != 0)


if __name__ == "__main__":
    sys.exit(main())
