"""Computes token masks for rows constrained by a grammar.

A sequence's matcher reads output tokens one step late, once they are committed. It is never ahead
of the slots, so a failed step needs no rollback here, and a matcher rebuilt from the grammar and
the output so far is equal. A separate thread reads and fills the masks while the model computes,
in the order of the steps; on a GPU sampling is launched before they are there. Independent of text.

No grammar may hurt the process: each is first read in a checking process, and here only if that one
survived it. None may hold up a step: matchers are prepared before their sequences enter.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire import grammar as grammars
from wire.grammar import BadGrammar, Matcher, Vocabulary
from wire.grammar_check.checks import ChecksLost, GrammarChecks, SlowGrammar
from worker_svc.device.late_rows import LateFill, LateRows
from worker_svc.device.transfer import upload_array
from worker_svc.protocol.preparations import PreparationOrders
from worker_svc.protocol.step import IntColumn
from worker_svc.sampling.mask_filling import GrammarPlace, Guesses, MaskFiller, read_tokens
from worker_svc.sampling.matcher_threads import large_stack_threads

MAX_WAITING_CHECKS = 16  # threads that wait for the checking process
MAX_WAITING_SLOW_CHECKS = 2  # others, for grammars that take longer


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
    late: LateFill | None = None  # what they are filled into, if a device takes them over
    guesses: Guesses | None = None  # that the masks wait for

    def on(self, device: torch.device) -> Tensor:
        """The masks [G, words] int32 on a device; if it can wait for them, nothing here does."""
        self.give_up()
        if self.late is None:
            return upload_array(device, self.filling.result().allowed.view(np.int32))
        masks = torch.empty((len(self.rows), self.late.num_words), dtype=torch.int32, device=device)
        self.late.fetch(masks)
        return masks

    def give_up(self) -> None:
        """No guesses will come, unless they are there."""
        if self.guesses is not None:
            self.guesses.give_up()

    def copy(self, into: Tensor) -> None:
        """The same as `on`, into the first lines of a tensor [.., words] of the device.

        Guesses must be on their way.
        """
        if self.late is None:
            into[: len(self.rows)] = self.on(into.device)
        else:
            self.late.fetch(into[: len(self.rows)])

    def problems(self) -> dict[int, str]:
        """Returns the reason for each sampling row that its grammar cannot continue."""
        problems = self.filling.result().problems
        return {int(self.rows[index]): f"grammar: {why}" for index, why in problems.items()}


Read = Callable[[], IntColumn]


def _no_vocabulary() -> Vocabulary:
    raise grammars.BadVocabulary("the model folder has no tokenizer.json")


@dataclass(slots=True)
class Grammars:
    """Builds matchers and fills masks. To be called from the compute thread only."""

    vocab_size: int
    read_vocabulary: Callable[[], Vocabulary] = _no_vocabulary
    checks: GrammarChecks | None = None  # None: grammars are trusted
    late_rows: LateRows | None = None  # read by the device that samples; None: masks stay here
    _checkers: ThreadPoolExecutor = field(init=False)
    _slow_checkers: ThreadPoolExecutor = field(init=False)
    _prepared: dict[int, GrammarPlace] = field(init=False, default_factory=dict)
    _builders: ThreadPoolExecutor = field(init=False)
    _slow_builder: ThreadPoolExecutor = field(init=False)
    _filler: ThreadPoolExecutor = field(init=False)
    _vocabulary: Future[Vocabulary] | None = field(init=False, default=None)
    _masks: MaskFiller = field(init=False, default_factory=MaskFiller)
    _guesses: Guesses | None = field(init=False, default=None)  # the newest

    def __post_init__(self) -> None:
        # Two threads: one builds a matcher while the other may be reading the vocabulary.
        self._builders = large_stack_threads(2, "grammar-build", is_nice=True)
        self._slow_builder = large_stack_threads(1, "slow-grammar-build", is_nice=True)
        self._filler = large_stack_threads(1, "grammar-fill", is_nice=False)
        self._checkers = ThreadPoolExecutor(MAX_WAITING_CHECKS, "grammar-check")
        self._slow_checkers = ThreadPoolExecutor(MAX_WAITING_SLOW_CHECKS, "slow-grammar-check")

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
            self._submit(building, grammar, output)
        else:
            self._checkers.submit(self._check, building, grammar, output, is_quick=True)
        return GrammarPlace(building, len(output))

    def take_orders(self, orders: PreparationOrders, answer: Callable[[int, str], None]) -> None:
        """Starts to build matchers for sequences that will enter with these preparations.

        `answer` is called from other threads, with a preparation and its grammar's problem, or ""
        once it is ready.
        """
        for preparation_id in orders.dropped_ids:
            self._prepared.pop(preparation_id, None)
        for order in orders.grammars:
            if order.refusal:
                answer(order.preparation_id, order.refusal)
                continue
            place = self.begin(order.grammar, order.output_token_ids.tolist())
            self._prepared[order.preparation_id] = place
            place.building.add_done_callback(partial(_tell, answer, order.preparation_id))

    def take_place(self, preparation_id: int, grammar: str, output: Sequence[int]) -> GrammarPlace:
        """The place of an entering sequence: prepared, or begun now."""
        return self._prepared.pop(preparation_id, None) or self.begin(grammar, output)

    def drop_all(self) -> None:
        """Forgets all preparations: the scheduler that asked for them is gone."""
        self._prepared.clear()

    def fill_for(self, device: torch.device, max_num_rows: int) -> None:
        """Fills masks into memory that the device reads; call it once, before the first."""
        self.late_rows = LateRows(max_num_rows, self._num_words, device)

    @property
    def last_fill_s(self) -> float:
        """Seconds that the newest masks took, all rows, without waits."""
        return self._masks.last_fill_s

    def give_up(self) -> None:
        """A launch has failed: it brings no guesses."""
        if self._guesses is not None:
            self._guesses.give_up()

    def fill(
        self, rows: IntColumn, places: Sequence[GrammarPlace], num_unread: IntColumn, read: Read
    ) -> GrammarRows:
        """Starts to advance places by their unread tokens and to fill their masks.

        `rows` [G] are the sampling rows of the places. `read` returns the unread tokens of all
        places, concatenated; it may wait for a device.
        """
        for place, count in zip(places, num_unread.tolist(), strict=True):
            place.num_read += count
        late = guesses = None
        if self.late_rows is not None:
            late = self.late_rows.take()
            if self._masks.wants_guesses and any(place.draws_from_all for place in places):
                guesses = Guesses()
        self._guesses = guesses
        filling = self._filler.submit(self._fill, places, num_unread, read, late, guesses)
        return GrammarRows(rows, filling, late, guesses)

    @property
    def _num_words(self) -> int:
        return -(-self.vocab_size // 32)

    def _check(
        self, building: Future[Matcher], grammar: str, output: Sequence[int], *, is_quick: bool
    ) -> None:
        """Reads a grammar in the checking process, and then here."""
        assert self.checks is not None
        try:
            self.checks.check(grammar, is_quick=is_quick)
        except SlowGrammar:  # others do not wait for it
            self._slow_checkers.submit(self._check, building, grammar, output, is_quick=False)
        except Exception as error:
            lost = isinstance(error, ChecksLost)
            building.set_exception(BadGrammar(str(error)) if lost else error)
        else:
            self._submit(building, grammar, output)

    def _submit(self, building: Future[Matcher], grammar: str, output: Sequence[int]) -> None:
        """Has a checked grammar read here; one that takes long delays no other."""
        is_slow = self.checks is not None and self.checks.knows_as_slow(grammar)
        builder = self._slow_builder if is_slow else self._builders
        builder.submit(self._build, building, grammar, output)

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
        with grammars.FailuresAs(BadGrammar, "it cannot be followed"):
            matcher = grammars.new_matcher(self._vocabulary.result(), grammar)
            read_tokens(matcher, output)
            if output:
                matcher.compute_bitmask()  # the first step finds much of its work done
        return matcher

    def _fill(
        self,
        places: Sequence[GrammarPlace],
        num_unread: IntColumn,
        read: Read,
        late: LateFill | None,
        guesses: Guesses | None,
    ) -> Filled:
        try:
            unread = np.split(read(), np.cumsum(num_unread)[:-1])
            if late is None:
                masks = np.zeros((len(places), self._num_words), dtype=np.int32)
            else:
                masks = late.begin()[: len(places)]
            problems = self._masks.fill(places, unread, masks, guesses)
            return Filled(masks.view(np.uint8), problems)
        finally:
            if late is not None:
                late.end()


def _problem_of(building: Future[Matcher]) -> str:
    error = building.exception()
    return "" if error is None else str(error) or type(error).__name__


def _tell(
    answer: Callable[[int, str], None], preparation_id: int, building: Future[Matcher]
) -> None:
    answer(preparation_id, _problem_of(building))
