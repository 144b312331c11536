"""The checking process: reads the vocabulary once, then forks a child for each grammar.

Its standard input is a socket to the process that started it. Each request is a connection of its
own, passed over that socket. A child that dies of its grammar costs nothing but itself; this
process tells why, by the signal. It ends with the process that started it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

from wire.grammar import (
    BadGrammar,
    BadVocabulary,
    GrammarTooLarge,
    Vocabulary,
    check,
    read_vocabulary,
)
from wire.grammar_check import frames
from wire.grammar_check.limits import QUICK_NICENESS, SLOW_SIGNAL, CheckLimits, give_way


class Helper:
    """One checking process."""

    def __init__(self, control: socket.socket, vocabulary: Vocabulary, limits: CheckLimits) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._limits = limits
        self._checks: dict[int, socket.socket] = {}  # by the child's process id
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
            self._check(connection, is_quick=content == frames.QUICK_CHECK)
        self._checks[child] = connection
        return True

    def _check(self, connection: socket.socket, *, is_quick: bool) -> None:
        """Checks grammars in the child until no more come; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            if not is_quick:
                os.setsid()  # with a share of time of its own
                give_way()
            self._limits.apply(is_quick=is_quick)
            while True:
                grammar = frames.receive(connection).decode()
                frames.send(connection, _answer(self._vocabulary, grammar))
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
            with self._checks.pop(child) as connection:
                if os.WIFSIGNALED(status):
                    with contextlib.suppress(OSError):
                        frames.send(connection, self._answer_of(os.WTERMSIG(status)))

    def _answer_of(self, signal_number: int) -> bytes:
        """The answer for a child that a signal has ended."""
        if signal_number == SLOW_SIGNAL:
            return frames.SLOW
        return frames.TOO_LARGE + self._limits.reason(signal_number).encode()


def _answer(vocabulary: Vocabulary, grammar: str) -> bytes:
    try:
        check(vocabulary, grammar)
    except BadGrammar as error:
        is_large = isinstance(error, GrammarTooLarge)
        return (frames.TOO_LARGE if is_large else frames.BAD) + str(error).encode()
    return frames.FOLLOWED


def main() -> None:
    # A fork for a check must find one thread: the Rust library starts none before it is used.
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    give_way(QUICK_NICENESS)
    settings = json.loads(frames.receive(control))
    try:
        vocabulary = read_vocabulary(
            settings["definition"], settings["vocab_size"], settings["eos_token_ids"]
        )
    except BadVocabulary as error:
        frames.send(control, str(error).encode())
        return
    frames.send(control, b"")
    # What Rust writes about a child's end is of no use, and may quote the grammar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    Helper(control, vocabulary, CheckLimits(**settings["limits"])).serve()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # its parent is gone: nothing is left to do
        main()
