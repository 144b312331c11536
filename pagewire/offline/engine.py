"""`pagewire up` as a child of this process: started, waited for, ended with it in any way.

It runs under a guard (pagewire/cli/launcher/guard.py) that holds the other end of a pipe. The pipe
closes when this process ends, also by SIGKILL; the guard then ends `up`, and that its services.
"""

import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from pagewire._connection.environment import API_KEY
from pagewire._errors import FailedPrecondition
from pagewire._terminal import StatusLine
from pagewire.cli.checkout import HERE
from pagewire.cli.launcher.invitation import READY
from pagewire.cli.launcher.processes import GRACE_S, POLL_S, Service
from pagewire.cli.launcher.services import LOOPBACK, ServiceSpec, free_ports
from pagewire.offline.words import neutral_environment
from pagewire.settings import environment

_PORTS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
_READY = re.compile(rf"^{re.escape(READY)}", re.MULTILINE)
_FAILURE = "pagewire: error: "
_END_S = 5.0  # for the guard to report the end, after the grace that it gives


class OwnEngine:
    """The services of one program, on free ports of the loopback interface, with a key of its own.

    Other users of the machine see the ports and have no key.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.api_key = secrets.token_urlsafe(32)
        ports = free_ports(len(_PORTS))
        self.target = f"{LOOPBACK}:{ports[_PORTS.index('--grpc-port')]}"
        folder = Path(tempfile.mkdtemp(prefix="pagewire-llm-"))
        numbered = [f"{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        own = ("--no-sample", f"--host={LOOPBACK}", f"--log-dir={folder}", "--drain-timeout-s=0")
        keys = dict.fromkeys((API_KEY, environment.variable("api-key", "gateway")), self.api_key)
        spec = ServiceSpec(
            "engine",
            "pagewire",
            ("up", *numbered, *own, *words),  # argparse takes the last of an option's values
            self.target,
            tuple((neutral_environment() | keys).items()),
            Path.cwd(),  # where the program's paths are
        )
        self._service = Service(spec, HERE, folder / "engine.log")
        # At the end of the program, when nothing refers to it, or at `stop`: what comes first.
        self._end = weakref.finalize(self, _end, self._service, folder, os.getpid())
        _let_go_in_forks(self._service)

    def wait_until_ready(self) -> None:
        """Waits until the services serve; a terminal shows for what. Raises FailedPrecondition."""
        line = StatusLine(sys.stderr)
        try:
            while not _READY.search(self._log()):
                if self._service.exit_status is not None:
                    raise FailedPrecondition(self._why_it_ended(), code="FAILED_PRECONDITION")
                line.show(self._service.log_tail().rpartition("\n")[2])
                time.sleep(POLL_S)
        finally:
            line.clear()

    def stop(self) -> None:
        """Ends the services and removes their logs; further calls do nothing."""
        self._end()

    def give_up(self) -> None:
        """Ends the services and leaves their logs, which the error of their start names."""
        self._end.detach()
        _end(self._service, None, os.getpid())

    def _why_it_ended(self) -> str:
        """The error of `pagewire up`, or the last lines that it wrote."""
        log = self._log()
        said = log.rpartition(_FAILURE)[2] if _FAILURE in log else self._service.log_tail()
        return f"the engine did not start: {said.strip()}"

    def _log(self) -> str:
        return self._service.log_path.read_text(errors="replace")


def _end(service: Service, logs: Path | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork, which owns no services
    service.release()
    service.wait(time.monotonic() + GRACE_S + _END_S)
    if logs is not None:
        shutil.rmtree(logs, ignore_errors=True)


def _let_go_in_forks(service: Service) -> None:
    """Closes the pipe's end in each fork of this process: it would keep the services alive."""
    kept = weakref.ref(service)

    def let_go() -> None:
        if (one := kept()) is not None:
            one.release()

    os.register_at_fork(after_in_child=let_go)
