"""Computes token masks for rows constrained by a grammar.

A sequence's matcher reads output tokens one step late, once they are committed. It is never ahead
of the slots, so a failed step needs no rollback here, and a matcher rebuilt from the grammar and
the output so far is equal. A separate thread fills the masks while the model computes. Independent
of text and tensors.

No grammar may hurt the process: each is first read in a checking process, and here only if that one
survived it. None may hold up a step: matchers are prepared before their sequences enter, and a
request whose masks take too much time ends.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from wire import grammar as grammars
from wire.grammar import BadGrammar, Matcher, Vocabulary
from wire.grammar_check.checks import ChecksLost, GrammarChecks
from worker_svc.protocol.preparations import GrammarOrders
from worker_svc.protocol.step import IntColumn
from worker_svc.sampling.matcher_threads import large_stack_threads, set_native_stack

MAX_THREADS = 8
MAX_WAITING_CHECKS = 16  # threads that wait for the checking process
# CPU time that a request's masks may take in all: so much, and for each token a little more.
FREE_S, FREE_S_PER_TOKEN = 0.25, 0.005
# After a fill that took this long, single masks are timed for some steps: of a step as many as take
# so much, one after the other, before all others are filled side by side.
SLOW_FILL_S, NUM_TIMED_FILLS, TIMED_S = 0.005, 16, 0.002


@dataclass(slots=True)
class GrammarPlace:
    """A sequence's position in its grammar."""

    building: Future[Matcher]
    num_read: int  # number of output tokens read
    spent_s: float = 0.0  # CPU time of the masks that were timed
    num_timed: int = 0

    def spend(self, seconds: float) -> None:
        """Counts the time of a mask. Raises BadGrammar if the masks take too long."""
        self.spent_s += seconds
        self.num_timed += 1
        if self.spent_s > FREE_S + FREE_S_PER_TOKEN * self.num_timed:
            raise BadGrammar(
                f"it takes too long to follow: {self.num_timed} of its masks took "
                f"{self.spent_s:.2f} s of CPU time"
            )

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
        return {int(self.rows[index]): f"grammar: {why}" for index, why in problems.items()}


def _no_vocabulary() -> Vocabulary:
    raise grammars.BadVocabulary("the model folder has no tokenizer.json")


@dataclass(slots=True)
class Grammars:
    """Builds matchers and fills masks. To be called from the compute thread only."""

    vocab_size: int
    read_vocabulary: Callable[[], Vocabulary] = _no_vocabulary
    checks: GrammarChecks | None = None  # None: grammars are trusted
    last_fill_s: float = field(init=False, default=0.0)  # what the newest masks took, all rows
    _checkers: ThreadPoolExecutor = field(init=False)
    _prepared: dict[int, GrammarPlace] = field(init=False, default_factory=dict)
    _num_to_time: int = field(init=False, default=0)  # fills whose masks are timed
    _builders: ThreadPoolExecutor = field(init=False)
    _filler: ThreadPoolExecutor = field(init=False)
    _vocabulary: Future[Vocabulary] | None = field(init=False, default=None)
    _filling: Future[Filled] | None = field(init=False, default=None)
    _executor: llguidance.LLExecutor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Two threads: one builds a matcher while the other may be reading the vocabulary.
        self._builders = large_stack_threads(2, "grammar-build", is_nice=True)
        self._filler = large_stack_threads(1, "grammar-fill", is_nice=False)
        self._checkers = ThreadPoolExecutor(MAX_WAITING_CHECKS, "grammar-check")

    def prepare(self) -> None:
        """Starts to read the vocabulary, so that the first grammar does not wait for it."""
        if self._vocabulary is None:
            self._vocabulary = self._builders.submit(self.read_vocabulary)
            if self.checks is not None:
                self._checkers.submit(self.checks.prepare)

    def begin(self, grammar: str, output: Sequence[int]) -> GrammarPlace:
        """Starts to build a matcher that has read `output`; returns its place at once."""
        self.prepare()
        building: Future[Matcher] = Future()
        if self.checks is None or self.checks.knows(grammar):
            self._builders.submit(self._build, building, grammar, output)
        else:
            self._checkers.submit(self._check, building, grammar, output)
        return GrammarPlace(building, len(output))

    def take_orders(self, orders: GrammarOrders, answer: Callable[[int, str], None]) -> None:
        """Starts to build matchers for sequences that will enter with these preparations.

        `answer` is called from other threads, with a preparation and its grammar's problem, or ""
        once it is ready.
        """
        for preparation_id in orders.dropped_ids:
            self._prepared.pop(preparation_id, None)
        for order in orders.wanted:
            place = self.begin(order.grammar, order.output_token_ids.tolist())
            self._prepared[order.preparation_id] = place
            place.building.add_done_callback(partial(_tell, answer, order.preparation_id))

    def take_place(self, preparation_id: int, grammar: str, output: Sequence[int]) -> GrammarPlace:
        """The place of an entering sequence: prepared, or begun now."""
        return self._prepared.pop(preparation_id, None) or self.begin(grammar, output)

    def drop_all(self) -> None:
        """Forgets all preparations: the scheduler that asked for them is gone."""
        self._prepared.clear()

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

    def _check(self, building: Future[Matcher], grammar: str, output: Sequence[int]) -> None:
        """Reads a grammar in the checking process, and then here."""
        assert self.checks is not None
        try:
            self.checks.check(grammar)
        except Exception as error:
            lost = isinstance(error, ChecksLost)
            building.set_exception(BadGrammar(str(error)) if lost else error)
        else:
            self._builders.submit(self._build, building, grammar, output)

    def _build(self, building: Future[Matcher], grammar: str, output: Sequence[int]) -> None:
        try:
            building.set_result(self._start(grammar, output))
        except BaseException as error:  # a panic of the Rust library is not an Exception
            building.set_exception(error)

    def _start(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Builds a matcher from the grammar.

        Copies of one matcher would share the states of its lexer, and the limit on their number:
        the first one to reach it would stop all copies.
        """
        assert self._vocabulary is not None
        with grammars.failures_as(BadGrammar, "it cannot be followed"):
            matcher = grammars.new_matcher(self._vocabulary.result(), grammar)
            _read(matcher, output)
            if output:
                matcher.compute_bitmask()  # the first step finds much of its work done
        return matcher

    def _fill(
        self, places: Sequence[GrammarPlace], num_unread: IntColumn, read: Callable[[], IntColumn]
    ) -> Filled:
        unread = np.split(read(), np.cumsum(num_unread)[:-1])
        began_s = time.perf_counter()
        masks = np.zeros((len(places), -(-self.vocab_size // 32)), dtype=np.int32)
        problems: dict[int, str] = {}
        matchers: dict[int, Matcher] = {}
        with grammars.failures_as(RuntimeError, "a grammar's mask cannot be filled"):
            began_cpu_s = time.thread_time()
            for index, (place, token_ids) in enumerate(zip(places, unread, strict=True)):
                try:
                    matchers[index] = place.read(token_ids.tolist())
                except (BadGrammar, grammars.BadVocabulary) as error:
                    problems[index] = str(error)
            healthy = {index: m for index, m in matchers.items() if not m.is_error()}
            timed = self._fill_timed(places, healthy, masks, problems)
            others = [(m, index) for index, m in healthy.items() if index not in timed]
            began_fill_s = time.perf_counter()
            if others:
                llguidance.numpy.fill_next_token_bitmask_par(self._threads(), others, masks)
            fill_s = time.perf_counter() - began_fill_s + time.thread_time() - began_cpu_s
            self._num_to_time = NUM_TIMED_FILLS if fill_s > SLOW_FILL_S else self._num_to_time - 1
        for index, matcher in matchers.items():
            if matcher.is_error():
                problems[index] = grammars.problem_of(matcher)
        masks[list(problems)] = 0  # a row without a token ends
        self.last_fill_s = time.perf_counter() - began_s
        return Filled(masks.view(np.uint8), problems)

    def _fill_timed(
        self,
        places: Sequence[GrammarPlace],
        matchers: Mapping[int, Matcher],
        masks: NDArray[np.int32],
        problems: dict[int, str],
    ) -> set[int]:
        """Fills the masks of some rows one after the other, if they are to be timed; returns these.

        Rows timed least often come first, of these those with the shortest outputs, so each has its
        turn, and a new one soon. Adds the problems of rows whose masks have taken too long.
        """
        timed: set[int] = set()
        if self._num_to_time <= 0:
            return timed
        began_s = before_s = time.thread_time()
        for index in sorted(matchers, key=lambda i: (places[i].num_timed, places[i].num_read)):
            llguidance.numpy.fill_next_token_bitmask(matchers[index], masks, index)
            timed.add(index)
            now_s = time.thread_time()
            try:
                places[index].spend(now_s - before_s)
            except BadGrammar as error:
                problems[index] = str(error)
            before_s = now_s
            if now_s - began_s > TIMED_S:
                break
        return timed

    def _threads(self) -> llguidance.LLExecutor:
        if self._executor is None:
            set_native_stack()
            num_threads = min(os.cpu_count() or 1, MAX_THREADS)
            self._executor = llguidance.LLExecutor(num_threads)
        return self._executor


def _problem_of(building: Future[Matcher]) -> str:
    error = building.exception()
    return "" if error is None else str(error) or type(error).__name__


def _tell(
    answer: Callable[[int, str], None], preparation_id: int, building: Future[Matcher]
) -> None:
    answer(preparation_id, _problem_of(building))


def _read(matcher: Matcher, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if matcher.is_stopped():  # complete: only end-of-sequence is allowed
            return
        matcher.consume_token(token_id)
