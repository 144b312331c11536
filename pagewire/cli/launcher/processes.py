"""Service processes of one owner: started together, waited for, watched, ended together.

`pagewire up` starts the product with it, and the benchmarks start what they measure.

Each runs under a guard (guard.py) with stdin held open by this process. Closing it ends the
service; so does the end of this process, in any way.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pagewire.cli.launcher import guard
from pagewire.cli.launcher.services import ServiceSpec
from pagewire.cli.options import CommandError

GRACE_S = 10.0
TAIL_LINES = 20
POLL_S = 0.1
# Exit statuses of a service that wants to be restarted.
ASKS_FOR_ANOTHER = range(70, 80)


class Service:
    """One running service and its log."""

    def __init__(self, spec: ServiceSpec, checkout: Path, log_path: Path) -> None:
        self.spec = spec
        self._checkout = checkout
        self.log_path = log_path
        command = [sys.executable, "-u", "-m", spec.module, *spec.arguments]
        with log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", guard.__file__, str(GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=checkout,
                start_new_session=True,  # keeps Ctrl-C from the services
            )

    def another(self) -> "Service":
        """Starts the same service again, with the same log."""
        return Service(self.spec, self._checkout, self.log_path)

    @property
    def guard_pid(self) -> int:
        """The process that is the service's parent."""
        return self._guard.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._guard.poll()

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def log_bytes(self) -> int:
        """How much it has written; while it starts, that is how one sees that it gets on."""
        return self.log_path.stat().st_size

    def release(self) -> None:
        """Makes its guard end it; does not wait."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def wait(self, deadline: float) -> None:
        """Waits until it has ended; a guard that runs past the deadline is killed."""
        try:
            self._guard.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


class Quiet:
    """For how long a log has not grown. A slow start is no failure as long as it gets on."""

    def __init__(self, now_s: float) -> None:
        self._num_bytes = 0
        self._since_s = now_s

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """By the log's size now."""
        if num_bytes != self._num_bytes:
            self._num_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s


class Services:
    """All services; leaving the `with` block ends every one."""

    def __init__(self, checkout: Path, log_folder: Path) -> None:
        self._checkout = checkout
        self._log_folder = log_folder
        self._running: list[Service] = []

    def start(self, specs: Sequence[ServiceSpec]) -> None:
        """Starts all services at once; each waits for those that it needs."""
        for spec in specs:
            log_path = self._log_folder / f"{spec.name}.log"
            log_path.unlink(missing_ok=True)  # of an earlier run
            self._running.append(Service(spec, self._checkout, log_path))

    def __getitem__(self, name: str) -> Service:
        """The running service of this name."""
        return next(service for service in self._running if service.spec.name == name)

    def wait_until(
        self,
        name: str,
        is_ready: Callable[[], bool],
        timeout_s: float,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Polls until a service is ready; `on_wait` is called before each pause.

        Raises CommandError when a service has ended, or when neither this one nor those it needs
        have logged anything for so long.
        """
        quiet = Quiet(time.monotonic())
        names = [service.spec.name for service in self._running]
        needed = names[: names.index(name) + 1]
        while not is_ready():
            self.check()
            on_wait()
            num_bytes = sum(map(self.log_bytes, needed))
            if quiet.seconds(num_bytes, time.monotonic()) > timeout_s:
                raise CommandError(
                    f"the {name} is not ready, and has logged nothing for {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def renew(self) -> list[str]:
        """Restarts services that asked for it; returns a message per restart."""
        renewed = []
        for index, service in enumerate(self._running):
            status = service.exit_status
            if status in ASKS_FOR_ANOTHER:
                self._running[index] = service.another()
                renewed.append(f"the {service.spec.name} ended with status {status}, restarting")
        return renewed

    def check(self) -> None:
        """Raises CommandError with the name and log tail of a service that has ended."""
        for service in self._running:
            if service.exit_status is not None:
                raise CommandError(
                    f"the {service.spec.name} ended with status {service.exit_status}; "
                    f"its log ({self._log_folder}) ends with\n{service.log_tail()}"
                )

    def log_bytes(self, name: str) -> int:
        """How much the service of this name has written."""
        return sum(s.log_bytes() for s in self._running if s.spec.name == name)

    def stop(self) -> None:
        """Ends all services, the gateway first, so that none reports the loss of another."""
        for service in reversed(self._running):
            service.release()
        deadline = time.monotonic() + GRACE_S + 5.0
        for service in reversed(self._running):
            service.wait(deadline)
        self._running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
