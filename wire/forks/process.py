"""A running helper process, as the process that started it has it. Thread-safe."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wire.forks import frames

_ROOT = Path(__file__).resolve().parents[2]


class NoStart(Exception):
    """Raised when a helper process ends before it is ready."""


class BadSettings(Exception):
    """Raised when a helper process cannot work with its settings; says why."""


class HelperProcess:
    """A helper process and the socket to it."""

    def __init__(self, module: str, settings: Mapping[str, Any]) -> None:
        """Starts a module with settings, which become JSON. Raises NoStart or BadSettings."""
        self._sending = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", module)
            # A session of its own: no signal of a terminal, and its own share of time.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), cwd=_ROOT, start_new_session=True
            )
        self.end = weakref.finalize(self, _end, self.process, self._control)
        try:
            frames.send(self._control, json.dumps(settings).encode())
            problem = frames.receive(self._control).decode()
        except (frames.Closed, OSError) as error:
            self.end()
            raise NoStart from error
        if problem:
            self.end()
            raise BadSettings(problem)

    @contextlib.contextmanager
    def connect(self, *, is_quick: bool = False) -> Iterator[Callable[[bytes], bytes]]:
        """A function that has one child do work. Closed or OSError: the process is gone."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs, self._sending:
                kind = frames.QUICK_CHECK if is_quick else frames.FULL_CHECK
                socket.send_fds(self._control, [kind], [theirs.fileno()])
            yield partial(_ask, mine)


def _ask(connection: socket.socket, work: bytes) -> bytes:
    with contextlib.suppress(BrokenPipeError):  # it has died, and the reason follows
        frames.send(connection, work)
    return frames.receive(connection)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
