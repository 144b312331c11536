"""Checks grammars in another process, each at most once; what is known is answered at once.

Thread-safe; `check` waits for the other process, so it belongs in a thread that may wait. A grammar
that exceeded a limit is refused from then on without being tried again.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from wire.grammar import BadGrammar, BadVocabulary, GrammarTooLarge
from wire.grammar_check import frames
from wire.grammar_check.limits import CheckLimits

MAX_KNOWN = 1_024  # grammars whose outcome is remembered, by hash
MAX_AT_ONCE = 4
_ROOT = Path(__file__).resolve().parents[2]
_TRIES = 2  # a checking process that was lost, not by a grammar, is replaced


class ChecksLost(Exception):
    """Raised when the checking process ended by itself, and another one, too."""


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """What a vocabulary is read from: the content of a tokenizer.json, and two of its facts."""

    definition: Callable[[], str]
    vocab_size: int
    eos_token_ids: Sequence[int]


class GrammarChecks:
    """The checks of one vocabulary's grammars, and their outcomes."""

    def __init__(self, source: VocabularySource, limits: CheckLimits | None = None) -> None:
        self._source = source
        self._limits = limits or CheckLimits()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._places = threading.Semaphore(min(MAX_AT_ONCE, max((os.cpu_count() or 1) // 2, 1)))
        self._process: _Process | None = None
        # Answer by hash of the grammar; the newest last.
        self._known: OrderedDict[bytes, Future[bytes]] = OrderedDict()
        self.num_checked = 0

    def prepare(self) -> None:
        """Starts the checking process, which then reads the vocabulary. Raises BadVocabulary."""
        self._started()

    def knows(self, grammar: str) -> bool:
        """Whether `check` would answer at once."""
        known = self._known.get(_hash(grammar))
        return known is not None and known.done()

    def check(self, grammar: str) -> None:
        """Raises BadGrammar, BadVocabulary or ChecksLost; waits for a check under way.

        Raises GrammarTooLarge if it exceeded a limit.
        """
        key = _hash(grammar)
        with self._lock:
            known = self._known.get(key)
            if is_mine := known is None:
                known = self._known[key] = Future()
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if is_mine:
            self._find_out(key, grammar, known)
        answer = known.result()
        problem = answer[1:].decode()
        if answer.startswith(frames.TOO_LARGE):
            raise GrammarTooLarge(problem)
        if answer.startswith(frames.BAD):
            raise BadGrammar(problem)

    def find(self, grammars: Iterable[str], problem: str) -> int | None:
        """The index of the first grammar with this problem; None if there is none.

        One process checks all of them, within the limits of one. Raises as `check` does.
        """
        with self._places, self._started().connect() as ask:
            for index, grammar in enumerate(grammars):
                try:
                    answer = ask(grammar)
                except (frames.Closed, OSError):
                    return None
                if answer[1:].decode() == problem:
                    return index
        return None

    def close(self) -> None:
        """Ends the checking process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _find_out(self, key: bytes, grammar: str, outcome: Future[bytes]) -> None:
        try:
            with self._places:
                outcome.set_result(self._ask(grammar))
        except BaseException as error:
            with self._lock:
                self._known.pop(key, None)  # it says nothing about the grammar
            outcome.set_exception(error)

    def _ask(self, grammar: str) -> bytes:
        self.num_checked += 1
        for _ in range(_TRIES):
            process = self._started()
            try:
                with process.connect() as ask:
                    return ask(grammar)
            except (frames.Closed, OSError):
                with self._starting:
                    if self._process is process:
                        self.close()
        raise ChecksLost("grammars cannot be checked: the process that does it ends by itself")

    def _started(self) -> "_Process":
        with self._starting:
            if self._process is None:
                self._process = _Process(self._source, self._limits)
            return self._process


class _Process:
    """A running checking process and the socket to it."""

    def __init__(self, source: VocabularySource, limits: CheckLimits) -> None:
        self._sending = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "wire.grammar_check.helper")
            # A session of its own: no signal of a terminal, and its own share of time.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), cwd=_ROOT, start_new_session=True
            )
        self.end = weakref.finalize(self, _end, self.process, self._control)
        settings = {
            "definition": source.definition(),
            "vocab_size": source.vocab_size,
            "eos_token_ids": list(source.eos_token_ids),
            "limits": asdict(limits),
        }
        try:
            frames.send(self._control, json.dumps(settings).encode())
            problem = frames.receive(self._control).decode()
        except (frames.Closed, OSError) as error:
            self.end()
            raise ChecksLost("grammars cannot be checked: the process does not start") from error
        if problem:
            self.end()
            raise BadVocabulary(problem)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Callable[[str], bytes]]:
        """A function that asks about grammars in one child. Closed or OSError: it is gone."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs, self._sending:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            yield partial(_ask, mine)


def _ask(connection: socket.socket, grammar: str) -> bytes:
    with contextlib.suppress(BrokenPipeError):  # it has died, and the reason follows
        frames.send(connection, grammar.encode())
    return frames.receive(connection)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _hash(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
