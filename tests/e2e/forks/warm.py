"""Services as forks of a process that has imported their libraries, torch above all.

A worker takes two and a half seconds of processor time to start, two of which are imports; tests
that kill workers start dozens. A fork runs `python -m MODULE` with the same words, in a process of
its own that signals end as any other. What `pagewire up`, the wheel and the images start is not
forked. `python -m tests.e2e.forks.warm ADDRESS LIBRARY` is the process that forks.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from tests.pace import patience

# By module what is imported before it is forked: all but the module itself.
LIBRARIES = {
    "worker_svc": "worker_svc.serving.server",
    "tests.e2e.forks.ranks": "worker_svc.serving.server",
    "scheduler_svc": "scheduler_svc.engine",
    "gateway": "gateway.process.server",
    "pagewire": "pagewire.cli",
    "pagewire.hub": "pagewire.hub.names",
}
START_S = patience(60.0)


class Fork:
    """A started service, with the methods of Popen that tests use."""

    def __init__(self, answers: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers  # tells when it ends: its status as Popen has it

    def poll(self) -> int | None:
        """The status, or None while it runs."""
        with contextlib.suppress(TimeoutError):
            self._read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""
        try:
            return self._read(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise TimeoutError
            self.returncode = int(self._answers.recv(64))
            self._answers.close()
        return self.returncode


# A process of its own from the beginning, or a fork of one that has imported its libraries.
Started = subprocess.Popen[bytes] | Fork


def start(
    module: str, arguments: Sequence[str], folder: Path, log: Path, environ: Mapping[str, str]
) -> Started:
    """Starts a service in `folder`; what it says is added to `log`, which is there on return.

    One for CUDA is no fork: its parent may have asked for devices, and then CUDA does not start.
    """
    with log.open("ab") as said:
        if "cuda" not in arguments:
            return fork(module, arguments, folder, (said.fileno(), said.fileno()), environ)
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, cwd=folder, env=dict(environ), stdout=said, stderr=said)


def fork(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    outputs: tuple[int, int],
    environ: Mapping[str, str],
) -> Fork:
    """Starts a module in `folder`, with its stdout and stderr."""
    asked = socket.socket(socket.AF_UNIX)
    asked.settimeout(START_S)
    asked.connect(_address_of(module))
    socket.send_fds(asked, [b"2"], outputs)
    words = [module, list(arguments), str(folder), dict(environ)]
    asked.sendall(json.dumps(words).encode() + b"\n")
    pid = int(asked.recv(64))
    asked.settimeout(None)
    return Fork(asked, pid)


@cache
def _address_of(module: str) -> str:
    """The socket of the process that forks a module; it ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address = f"{folder.name}/asked"
    unset = {"OMP_NUM_THREADS"}  # as for services that are started otherwise
    environ = {name: text for name, text in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.forks.warm", address, LIBRARIES[module]],
        cwd=Path(__file__).parents[3],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"listening\n"

    def end() -> None:
        process.communicate()  # closes its input
        folder.cleanup()

    atexit.register(end)
    return address


def _serve(address: str, library: str) -> None:
    """Forks what is asked for until its input ends."""
    from worker_svc import config  # noqa: PLC0415 - only here

    config.prepare_environment()
    importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of the processes that answer
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        os.write(1, b"listening\n")
        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Starts one service, tells its id, waits for its end and tells its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    with connection.makefile() as lines:
        words = json.loads(lines.readline())
    if not (pid := os.fork()):
        connection.close()
        _run(*words, outputs)
    for output in outputs:  # who reads one sees its end when the service ends
        os.close(output)
    connection.sendall(b"%d" % pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # if who asked has gone
        connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(
    module: str, arguments: list[str], folder: str, environ: dict[str, str], outputs: list[int]
) -> NoReturn:
    """Does what `python -m module` does, in a new process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, opened in enumerate((nothing, *outputs)):
        os.dup2(opened, number)
        os.close(opened)
    sys.argv[1:] = arguments
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
