"""Keeps the services alive: restarts one that died or hangs, and drains them in order at the end.

One loop of the caller drives it: `tick` looks at every service once and does what is due. It says
in one line each what died and why, and that it is back.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pagewire._channel import Connection
from pagewire.cli.launcher.health_watch import HealthWatch
from pagewire.cli.launcher.processes import POLL_S, REFUSALS, Quiet, Services
from pagewire.cli.launcher.restarts import Restarts
from pagewire.cli.launcher.services import ServiceSpec
from pagewire.cli.options import CommandError

LEAST_START_S = 60.0  # for a restart to log something or to answer
STARTS = 10.0  # times the first start of a service: the same, where starts are slow
KILL_S = 5.0  # a guard that has not reported the end of its service by then is killed, too
HURRIED_S = 2.0  # for a gateway to end its streams with an error
MARGIN_S = 5.0  # for the services to end, after the time that the drain has


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds: silence while a service starts, silence of a ready one, and for a drain."""

    startup_timeout_s: float
    hang_timeout_s: float
    drain_timeout_s: float


class KeptService:
    """One service that is kept alive, over its processes."""

    def __init__(
        self, services: Services, name: str, connection: Connection, limits: TimeLimits
    ) -> None:
        self.name = name
        self._services = services
        self._connection = connection
        self._limits = limits
        self._restarts = Restarts()
        self._start_s: float | None = None  # that its first start took; None before it was ready
        self._down_s: float | None = None  # since when it is not ready, after a death
        self._due_s: float | None = None  # when to start the next process
        self._why = ""  # of the last death
        self._begin(time.monotonic())

    def _begin(self, now_s: float) -> None:
        """A new process has been started."""
        self._watch = HealthWatch(self._connection, self._limits.hang_timeout_s)
        self._quiet = Quiet(now_s)
        self._began_s = self._before_s = now_s
        self._ready_s: float | None = None  # since when this process is ready
        self._killed_s: float | None = None  # when it was killed for a hang

    @property
    def is_ready(self) -> bool:
        """True if its process serves."""
        return self._due_s is None and self._watch.is_serving

    def tick(self, now_s: float) -> Iterator[str]:
        """Does what is due; yields lines for the user. Raises CommandError to give up."""
        service = self._services[self.name]
        if self._due_s is not None:
            if now_s >= self._due_s:
                self._due_s = None
                self._services.restart(self.name)
                self._begin(now_s)
        elif service.exit_status is not None:
            yield from self._bury(now_s)
        elif self._killed_s is not None:
            if now_s > self._killed_s + KILL_S:
                service.kill_guard()
        else:
            yield from self._look(now_s)

    def _look(self, now_s: float) -> Iterator[str]:
        self._listen(now_s)
        if self._watch.is_serving and self._ready_s is None:
            self._ready_s = now_s
            if self._start_s is None:
                self._start_s = now_s - self._began_s
            if self._down_s is not None:
                yield f"the {self.name} {self._why}, is back after {now_s - self._down_s:.1f} s"
            self._down_s = None
        if problem := self._hang(now_s):
            self._why = f"{problem} and was killed"
            self._killed_s = now_s
            self._services[self.name].kill()

    def _listen(self, now_s: float) -> None:
        self._watch.tick(now_s - self._before_s)
        self._before_s = now_s

    def _hang(self, now_s: float) -> str:
        """Why the process must be killed; empty if it need not."""
        silence = self._watch.silence
        if self._ready_s is not None:
            return f"gave no answer for {silence.seconds:.1f} s" if silence.is_too_long else ""
        if self._start_s is None:
            return ""  # its first start; who waits for it, gives up
        quiet_s = self._quiet.seconds(self._services.log_bytes(self.name), now_s)
        limit_s = max(LEAST_START_S, STARTS * self._start_s)
        limit_s = min(limit_s, self._limits.startup_timeout_s)
        is_stuck = min(quiet_s, silence.seconds) > limit_s
        return f"did not answer or log anything for {limit_s:.0f} s" if is_stuck else ""

    def _bury(self, now_s: float) -> Iterator[str]:
        service = self._services[self.name]
        self._watch.close()
        end = service.how_it_ended()
        self._why = self._why if self._killed_s is not None else end
        if self._start_s is None and service.exit_status in REFUSALS:
            raise CommandError(self._services.obituary(service, end))
        pause_s = self._restarts.died(None if self._ready_s is None else now_s - self._ready_s)
        if pause_s is None:
            what = f"{self._restarts.summary}, the last time it {self._why}"
            raise CommandError(self._services.obituary(service, what))
        self._down_s = now_s if self._down_s is None else self._down_s
        self._due_s = now_s + pause_s
        yield f"the {self.name} {self._why}, restarting" + (f" in {pause_s:g} s" * (pause_s > 0))

    def is_ending(self, now_s: float) -> bool:
        """True if its process, asked to end, runs and answers."""
        if self._services[self.name].exit_status is not None:
            return False
        self._listen(now_s)
        return not self._watch.silence.is_too_long

    def close(self) -> None:
        """Stops watching."""
        self._watch.close()


class ServiceSupervisor:
    """All services of one `pagewire up`, which it starts; in the order of what needs what."""

    def __init__(
        self,
        services: Services,
        specs: Mapping[ServiceSpec, Connection],
        limits: TimeLimits,
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        """`specs` says how to reach each; `say` prints a line, `check` raises for a stop signal."""
        services.start(list(specs))
        self.connections = {spec.name: connection for spec, connection in specs.items()}
        self._services = services
        self._limits = limits
        self._say = say
        self._check = check
        self._kept = [
            KeptService(services, spec.name, connection, limits)
            for spec, connection in specs.items()
        ]

    def tick(self) -> None:
        """Looks at every service once. Raises CommandError for a crash loop."""
        self._check()
        self._look()

    def _look(self) -> None:
        for kept in self._kept:
            for line in kept.tick(time.monotonic()):
                self._say(line)

    def wait_until_ready(self, name: str, on_wait: Callable[[str], None]) -> None:
        """Waits for a service's first start; `on_wait` gets its last message before each pause.

        Raises CommandError when neither this one nor those it needs have logged anything for the
        limit, and for a service that cannot start.
        """
        names = [kept.name for kept in self._kept]
        needed = self._kept[: names.index(name) + 1]
        quiet, limit_s = Quiet(time.monotonic()), self._limits.startup_timeout_s
        while not needed[-1].is_ready:
            on_wait(self._services[name].doing())
            self.tick()
            num_bytes = sum(self._services.log_bytes(kept.name) for kept in needed)
            if quiet.seconds(num_bytes, time.monotonic()) > limit_s:
                raise CommandError(
                    f"the {name} is not ready, and has logged nothing for {limit_s:g} s"
                )
            time.sleep(POLL_S)

    def kill(self, name: str, why: str) -> None:
        """Kills a service, which the next ticks start again."""
        self._say(f"killing the {name}: {why}")
        self._services[name].kill()

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Lets the services finish what runs: the gateway, then the scheduler, then the worker.

        The others are kept alive while one drains. Returns when all have ended, at the latest some
        seconds after the drain's time, or soon after `is_hurried` holds.
        """
        deadline_s = time.monotonic() + self._limits.drain_timeout_s + MARGIN_S
        while self._kept:
            kept = self._kept.pop()
            self._services[kept.name].drain()
            while kept.is_ending(now_s := time.monotonic()) and now_s < deadline_s:
                if is_hurried():
                    kept.close()
                    return self._hurry()
                self._look()
                time.sleep(POLL_S)
            kept.close()
        return None

    def _hurry(self) -> None:
        """A gateway that drains ends its streams with an error; then everything is killed."""
        gateway = self._services["gateway"]
        gateway.drain()
        deadline_s = time.monotonic() + HURRIED_S
        while gateway.exit_status is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self._services.kill()

    def close(self) -> None:
        """Stops watching."""
        for kept in self._kept:
            kept.close()
