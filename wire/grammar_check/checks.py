"""Checks grammars in another process, each at most once; what is known is answered at once.

Thread-safe; `check` waits for the other process, so it belongs in a thread that may wait. A grammar
that exceeded a limit is refused from then on without being tried again. Quick checks have places of
their own: one that takes longer ends, and its caller asks for a full one, which delays no others.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from wire.forks import frames
from wire.forks.limits import CheckLimits
from wire.forks.process import BadSettings, HelperProcess, NoStart
from wire.grammar import BadGrammar, BadVocabulary, GrammarTooLarge

MAX_KNOWN = 1_024  # grammars whose outcome is remembered, by hash
MAX_AT_ONCE = 4  # quick ones
MAX_FULL_AT_ONCE = 2
_TRIES = 2  # a checking process that was lost, not by a grammar, is replaced


class ChecksLost(Exception):
    """Raised when the checking process ended by itself, and another one, too."""


class SlowGrammar(Exception):
    """Raised where a quick check does not suffice. Equal grammars have equal keys."""

    def __init__(self, key: bytes) -> None:
        super().__init__("the grammar takes longer than a quick check")
        self.key = key


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """The source of a vocabulary: the content of a tokenizer.json, and two of its facts."""

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
        num_half = max((os.cpu_count() or 1) // 2, 1)
        self._quick_places = threading.Semaphore(min(MAX_AT_ONCE, max(num_half, 2)))
        self._full_places = threading.Semaphore(min(MAX_FULL_AT_ONCE, num_half))
        self._process: HelperProcess | None = None
        # By hash of the grammar; the newest last.
        self._known: OrderedDict[bytes, _Outcome] = OrderedDict()
        self.num_checked = 0

    def prepare(self) -> None:
        """Starts the checking process, which then reads the vocabulary. Raises BadVocabulary."""
        self._started()

    def knows(self, grammar: str) -> bool:
        """True if `check` would answer at once."""
        known = self._known.get(_hash(grammar))
        return known is not None and known.answer.done() and not known.is_slow()

    def knows_as_slow(self, grammar: str) -> bool:
        """True if a quick check was known not to suffice: reading it takes long again."""
        known = self._known.get(_hash(grammar))
        return known is not None and (known.is_slow() or not known.is_quick)

    def check(self, grammar: str, *, is_quick: bool = False) -> None:
        """Raises BadGrammar, BadVocabulary or ChecksLost; waits for a check under way.

        Raises GrammarTooLarge if it exceeded a limit, and SlowGrammar if `is_quick` and it takes
        longer than that.
        """
        key = _hash(grammar)
        while True:
            outcome, is_mine = self._outcome_of(key, is_quick=is_quick)
            if is_mine:
                self._find_out(key, grammar, outcome)
            elif is_quick and not outcome.is_quick and not outcome.answer.done():
                raise SlowGrammar(key)
            answer = outcome.answer.result()
            if not answer.startswith(frames.SLOW):
                break
            if is_quick:
                raise SlowGrammar(key)
        problem = answer[1:].decode()
        if answer.startswith(frames.TOO_LARGE):
            raise GrammarTooLarge(problem)
        if answer.startswith(frames.BAD):
            raise BadGrammar(problem)

    def find(self, grammars: Iterable[str], problem: str, *, is_quick: bool = False) -> int | None:
        """The index of the first grammar with this problem; None if there is none.

        One process checks all of them, within the limits of one. Raises as `check` does.
        """
        with self._place(is_quick=is_quick), self._started().connect(is_quick=is_quick) as ask:
            for index, grammar in enumerate(grammars):
                try:
                    answer = ask(grammar.encode())
                except (frames.Closed, OSError):
                    return None
                if answer.startswith(frames.SLOW):
                    raise SlowGrammar(_hash(grammar))
                if answer[1:].decode() == problem:
                    return index
        return None

    def close(self) -> None:
        """Ends the checking process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _outcome_of(self, key: bytes, *, is_quick: bool) -> "tuple[_Outcome, bool]":
        """The outcome, known or being found out, and whether the caller is to find it out."""
        with self._lock:
            known = self._known.get(key)
            if is_mine := known is None or (known.is_slow() and not is_quick):
                known = self._known[key] = _Outcome(Future(), is_quick)
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            assert known is not None
            return known, is_mine

    def _find_out(self, key: bytes, grammar: str, outcome: "_Outcome") -> None:
        try:
            with self._place(is_quick=outcome.is_quick):
                outcome.answer.set_result(self._ask(grammar, is_quick=outcome.is_quick))
        except BaseException as error:
            with self._lock:
                self._known.pop(key, None)  # it says nothing about the grammar
            outcome.answer.set_exception(error)

    def _place(self, *, is_quick: bool) -> threading.Semaphore:
        return self._quick_places if is_quick else self._full_places

    def _ask(self, grammar: str, *, is_quick: bool) -> bytes:
        self.num_checked += 1
        for _ in range(_TRIES):
            process = self._started()
            try:
                with process.connect(is_quick=is_quick) as ask:
                    return ask(grammar.encode())
            except (frames.Closed, OSError):
                with self._starting:
                    if self._process is process:
                        self.close()
        raise ChecksLost("grammars cannot be checked: the process that does it ends by itself")

    def _started(self) -> HelperProcess:
        with self._starting:
            if self._process is None:
                self._process = self._start()
            return self._process

    def _start(self) -> HelperProcess:
        source = self._source
        settings = {
            "definition": source.definition(),
            "vocab_size": source.vocab_size,
            "eos_token_ids": list(source.eos_token_ids),
            "limits": asdict(self._limits),
        }
        try:
            return HelperProcess("wire.grammar_check.helper", settings)
        except BadSettings as error:
            raise BadVocabulary(str(error)) from error
        except NoStart as error:
            raise ChecksLost("grammars cannot be checked: the process does not start") from error


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The answer about one grammar, of a quick check or of a full one."""

    answer: Future[bytes]
    is_quick: bool

    def is_slow(self) -> bool:
        """True if a quick check has ended without an answer."""
        if not self.is_quick or not self.answer.done() or self.answer.exception() is not None:
            return False
        return self.answer.result().startswith(frames.SLOW)


def _hash(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
