"""Service processes of one owner: started together, waited for, ended together.

`pagewire up` starts the product with it and keeps it alive (supervisor.py); the benchmarks start
what they measure.

Each runs under a guard (guard.py) with stdin held open by this process. Closing it ends the
service; so does the end of this process, in any way.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from pagewire.cli.checkout import environment
from pagewire.cli.launcher import guard
from pagewire.cli.launcher.services import ServiceSpec
from pagewire.cli.options import CommandError

GRACE_S = 10.0
LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
TAIL_LINES = 20
POLL_S = 0.1
REFUSALS = (1, 2)  # statuses of a service that cannot start, and says why in its log
_FAILED_START = "start-up failed: "
# A line of a log, by each service's format, or of a usage message.
_REASON = re.compile(
    r"(?: ERROR [\w.]+: | [\w.]+ ERROR |^(?:python -m [\w.]+|pagewire[\w ]*): error: )"
    rf"(?:{_FAILED_START}\w+: )?(?P<said>.+)"
)
_MESSAGE = re.compile(r"^\S+ \S+ [A-Z]+ [\w.]+: (.*)$", re.MULTILINE)


class Service:
    """One running service and its log."""

    def __init__(self, spec: ServiceSpec, checkout: Path, log_path: Path) -> None:
        self.spec = spec
        self._checkout = checkout
        self.log_path = log_path
        command = [sys.executable, "-u", "-m", spec.module, *spec.arguments]
        # Logs name callers and files: they are for the user alone.
        with os.fdopen(os.open(log_path, LOG_FLAGS, 0o600), "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", guard.__file__, str(GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.folder or checkout,
                env=environment(checkout) | dict(spec.environ),
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
        """Its exit status, in the shell's form for signals; None while it runs."""
        status = self._guard.poll()
        return status if status is None or status >= 0 else 128 - status

    def how_it_ended(self) -> str:
        """Its end in words."""
        status = self.exit_status or 0
        name = ""
        if status > 128:
            with contextlib.suppress(ValueError):
                name = f" ({signal.Signals(status - 128).name})"
        return f"ended with status {status}{name}"

    def reason(self) -> str:
        """The sentence with which it refused to start; empty where its log has more to show."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        if any(line.startswith(("Traceback", "Fatal Python error")) for line in lines):
            return ""
        found = [match for line in lines if (match := _REASON.search(line))]
        started = [match for match in found if _FAILED_START in match.string]
        return next((str(match["said"]) for match in reversed(started or found)), "")

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def doing(self) -> str:
        """The last message of its log, such as what it compiles; empty before the first."""
        return last_message(self.log_tail())

    def log_bytes(self) -> int:
        """The bytes that it has written; while it starts, they show that it gets on."""
        return self.log_path.stat().st_size

    def drain(self) -> None:
        """Sends it SIGTERM: it finishes what runs. A second time, it ends at once."""
        self._tell(guard.DRAIN)

    def kill(self) -> None:
        """Sends it SIGKILL."""
        self._tell(guard.KILL)

    def kill_guard(self) -> None:
        """Ends a service whose guard does not listen, and all that it has started."""
        guard.kill_descendants(self._guard.pid)
        self._guard.kill()

    def _wake_guard(self) -> None:
        """A guard that is stopped does nothing of what it is told, and keeps the service."""
        self._guard.send_signal(signal.SIGCONT)

    def _tell(self, message: bytes) -> None:
        self._wake_guard()
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(message)
                self._guard.stdin.flush()

    def release(self) -> None:
        """Makes its guard end it; does not wait."""
        self._wake_guard()
        if self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()

    def wait(self, deadline: float) -> None:
        """Waits until it has ended; past the deadline it is killed with all it has started."""
        try:
            self._guard.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill_guard()
            self._guard.wait()


def last_message(log: str) -> str:
    """The message of a log's last line, without its time, level and logger."""
    for line in reversed(log.splitlines()):
        if (match := _MESSAGE.match(line)) is not None:
            return str(match[1])
        if line.startswith("{"):  # --log-format json; the first line of a tail may be half of one
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(line)["message"])
    return ""


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
        needed = self._names[: self._names.index(name) + 1]
        while not is_ready():
            self.check()
            on_wait()
            num_bytes = sum(map(self.log_bytes, needed))
            if quiet.seconds(num_bytes, time.monotonic()) > timeout_s:
                raise CommandError(
                    f"the {name} is not ready, and has logged nothing for {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def restart(self, name: str) -> None:
        """Starts a service that has ended again."""
        index = self._names.index(name)
        ended = self._running[index]
        ended.release()
        self._running[index] = ended.another()

    def check(self) -> None:
        """Raises CommandError with the name and log tail of a service that has ended."""
        for service in self._running:
            if service.exit_status is not None:
                raise CommandError(self.obituary(service, service.how_it_ended()))

    def obituary(self, service: Service, what: str) -> str:
        """The end of a service, with the reason that it gave, else the end of its log."""
        if service.exit_status in REFUSALS and (reason := service.reason()):
            return f"the {service.spec.name} {what}: {reason} (its log: {service.log_path})"
        return (
            f"the {service.spec.name} {what}; its log ({self._log_folder}) ends with\n"
            f"{service.log_tail()}"
        )

    @property
    def _names(self) -> list[str]:
        return [service.spec.name for service in self._running]

    def log_bytes(self, name: str) -> int:
        """The bytes that the service of this name has written."""
        return sum(s.log_bytes() for s in self._running if s.spec.name == name)

    def kill(self) -> None:
        """Kills all services; does not wait."""
        for service in self._running:
            service.kill()

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

    def __exit__(self, *_: object) -> None:
        self.stop()
