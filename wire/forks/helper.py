"""The process that forks a child for each piece of work.

Its standard input is a socket to the process that started it. Each request is a connection of its
own, passed over that socket. A child that dies of its work costs nothing but itself; this process
tells why, by the signal. It ends with the process that started it.
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable

from wire.forks import frames
from wire.forks.limits import SLOW_SIGNAL, CheckLimits, give_way


class Helper:
    """One helper process."""

    def __init__(
        self, control: socket.socket, answer: Callable[[bytes], bytes], limits: CheckLimits
    ) -> None:
        """`answer` does the work on one piece, in a child."""
        self._control = control
        self._answer = answer
        self._limits = limits
        self._children: dict[int, socket.socket] = {}  # by the child's process id
        self._child_ended, child_ends = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(child_ends, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(child_ends, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Forks for each connection that comes, until the other side ends."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, self._child_ended], [], [])
            if self._child_ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._child_ended, 1 << 10)
                self._reap()
            if control in ready and not self._accept():
                return

    def _accept(self) -> bool:
        content, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not content:
            return False
        connection = socket.socket(fileno=fds[0])
        child = os.fork()
        if not child:
            self._work(connection, is_quick=content == frames.QUICK_CHECK)
        self._children[child] = connection
        return True

    def _work(self, connection: socket.socket, *, is_quick: bool) -> None:
        """Does the work in the child until no more comes; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            if not is_quick:
                os.setsid()  # with a share of time of its own
                give_way()
            self._limits.apply(is_quick=is_quick)
            while True:
                frames.send(connection, self._answer(frames.receive(connection)))
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not child:
                return
            with self._children.pop(child) as connection:
                if os.WIFSIGNALED(status):
                    with contextlib.suppress(OSError):
                        frames.send(connection, self._answer_of(os.WTERMSIG(status)))

    def _answer_of(self, signal_number: int) -> bytes:
        """The answer for a child that a signal has ended."""
        if signal_number == SLOW_SIGNAL:
            return frames.SLOW
        return frames.TOO_LARGE + self._limits.reason(signal_number).encode()
