"""Computes token masks for rows constrained by a grammar.

A sequence's matcher reads output tokens one step late, once they are committed. It is never ahead
of the slots, so a failed step needs no rollback here, and a matcher rebuilt from the grammar and
the output so far is equal. A separate thread fills the masks while the model computes. Independent
of text and tensors.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from wire import grammar as grammars
from wire.grammar import BadGrammar, Matcher, Vocabulary
from worker_svc.protocol.step import IntColumn

MAX_THREADS = 8


@dataclass(slots=True)
class GrammarPlace:
    """A sequence's position in its grammar."""

    building: Future[Matcher]
    num_read: int  # number of output tokens read

    def read(self, token_ids: Sequence[int]) -> Matcher:
        """Advances by tokens, once the matcher is built. Raises BadGrammar or BadVocabulary."""
        matcher = self.building.result()
        _read(matcher, token_ids)
        self.num_read += len(token_ids)
        return matcher


@dataclass(frozen=True, slots=True)
class Filled:
    """Allowed next tokens, one bit per row and token, and the rows without a next token."""

    allowed: NDArray[np.uint8]  # [G, bytes], lowest bit first, padded to whole words
    problems: dict[int, str]  # reason, by index into the G rows


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """The rows of a step with grammars, and their masks, which may still be computed."""

    rows: IntColumn  # [G], indices into the step's sampling rows
    filling: Future[Filled]

    def allowed(self) -> NDArray[np.uint8]:
        """Waits for the masks and returns them, [G, bytes]."""
        return self.filling.result().allowed

    def problems(self) -> dict[int, str]:
        """Returns the reason for each sampling row that its grammar cannot continue."""
        problems = self.filling.result().problems
        return {int(self.rows[index]): problem for index, problem in problems.items()}


def _no_vocabulary() -> Vocabulary:
    raise grammars.BadVocabulary("the model folder has no tokenizer.json")


@dataclass(slots=True)
class Grammars:
    """Builds matchers and fills masks. To be called from the compute thread only."""

    vocab_size: int
    read_vocabulary: Callable[[], Vocabulary] = _no_vocabulary
    _builders: ThreadPoolExecutor = field(init=False)
    _filler: ThreadPoolExecutor = field(init=False)
    _vocabulary: Future[Vocabulary] | None = field(init=False, default=None)
    _filling: Future[Filled] | None = field(init=False, default=None)
    _executor: llguidance.LLExecutor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Two threads: one builds a matcher while the other may be reading the vocabulary.
        self._builders = ThreadPoolExecutor(2, "grammar-build")
        self._filler = ThreadPoolExecutor(1, "grammar-fill")

    def prepare(self) -> None:
        """Starts to read the vocabulary, so that the first grammar does not wait for it."""
        if self._vocabulary is None:
            self._vocabulary = self._builders.submit(self.read_vocabulary)

    def begin(self, grammar: str, output: Sequence[int]) -> GrammarPlace:
        """Starts to build a matcher that has read `output`; returns its place at once."""
        self.prepare()
        return GrammarPlace(self._builders.submit(self._start, grammar, output), len(output))

    def settle(self) -> None:
        """Waits for a failed step's masks that are still being filled, so no place changes."""
        if self._filling is not None:
            wait([self._filling])

    def fill(
        self, places: Sequence[GrammarPlace], num_unread: IntColumn, read: Callable[[], IntColumn]
    ) -> Future[Filled]:
        """Starts to advance places by their unread tokens and to fill their masks.

        `read` returns the unread tokens of all places, concatenated; it may wait for a device.
        """
        self._filling = self._filler.submit(self._fill, places, num_unread, read)
        return self._filling

    def _start(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Builds a matcher from the grammar.

        Copies of one matcher would share the states of its lexer, and the limit on their number:
        the first one to reach it would stop all copies.
        """
        assert self._vocabulary is not None
        with grammars.failures_as(BadGrammar, "it cannot be followed"):
            matcher = grammars.new_matcher(self._vocabulary.result(), grammar)
            _read(matcher, output)
        return matcher

    def _fill(
        self, places: Sequence[GrammarPlace], num_unread: IntColumn, read: Callable[[], IntColumn]
    ) -> Filled:
        unread = np.split(read(), np.cumsum(num_unread)[:-1])
        masks = np.zeros((len(places), -(-self.vocab_size // 32)), dtype=np.int32)
        problems: dict[int, str] = {}
        matchers: dict[int, Matcher] = {}
        with grammars.failures_as(RuntimeError, "a grammar's mask cannot be filled"):
            for index, (place, token_ids) in enumerate(zip(places, unread, strict=True)):
                try:
                    matchers[index] = place.read(token_ids.tolist())
                except (BadGrammar, grammars.BadVocabulary) as error:
                    problems[index] = str(error)
            healthy = [(m, index) for index, m in matchers.items() if not m.is_error()]
            if healthy:
                llguidance.numpy.fill_next_token_bitmask_par(self._threads(), healthy, masks)
        for index, matcher in matchers.items():
            if matcher.is_error():
                problems[index] = grammars.problem_of(matcher)
                masks[index] = 0
        return Filled(masks.view(np.uint8), problems)

    def _threads(self) -> llguidance.LLExecutor:
        if self._executor is None:
            num_threads = min(os.cpu_count() or 1, MAX_THREADS)
            self._executor = llguidance.LLExecutor(num_threads)
        return self._executor


def _read(matcher: Matcher, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if matcher.is_stopped():  # complete: only end-of-sequence is allowed
            return
        matcher.consume_token(token_id)
