"""`python -m MODULE` as a fork whose output a test reads, as that of Popen with pipes and text."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.e2e.forks import warm


class Command:
    """A started command, with the methods of Popen that tests use."""

    def __init__(self, forked: warm.Fork, stdout: IO[str], stderr: IO[str]) -> None:
        self._forked, self.stdout, self.stderr = forked, stdout, stderr
        self.poll, self.send_signal = forked.poll, forked.send_signal
        self.terminate, self.kill = forked.terminate, forked.kill
        self.pid, self.wait = forked.pid, forked.wait

    @property
    def returncode(self) -> int | None:
        """The status, once it was asked for."""
        return self._forked.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of its output, and waits for its end. Raises subprocess.TimeoutExpired."""
        if self.stdout.closed:
            return "", ""
        with self.stdout, self.stderr, ThreadPoolExecutor(1) as beside:
            complaints = beside.submit(self.stderr.read)
            said = self.stdout.read(), complaints.result()
        self.wait(timeout)
        return said


def start(
    module: str, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> Command:
    """Starts a module of `warm.LIBRARIES` in `folder`."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    try:
        forked = warm.fork(module, arguments, folder, (to_out, to_err), environ)
    finally:
        os.close(to_out)
        os.close(to_err)
    return Command(forked, os.fdopen(out), os.fdopen(err))
