"""Fills token masks on the host: on several threads, and so that no grammar holds up a step.

A request whose masks take too much CPU time ends. To know, some are timed after a slow fill, while
all others are filled. While masks are slow, rows that draw from all their tokens guess: the token
that a row draws without a mask is the one it draws with the mask, if its grammar accepts it; then
that token alone is its mask. Knows no tensors and no steps.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from wire import grammar as grammars
from wire.grammar import BadGrammar, Matcher
from worker_svc.protocol.step import IntColumn
from worker_svc.sampling.matcher_threads import large_stack_threads, set_native_stack

# Threads that fill masks: of the cores as many as there are, but of many some stay free.
MAX_THREADS, ALL_CORES, FREE_CORES = 16, 8, 2
# CPU time that a request's masks may take in all: so much, and for each token a little more.
FREE_S, FREE_S_PER_TOKEN = 0.25, 0.005
# After a fill that took this long, single masks are timed for some steps: of a step about as many
# as take so much, one after the other, while all others are filled side by side.
SLOW_FILL_S, NUM_TIMED_FILLS, TIMED_S = 0.005, 16, 0.002
LEAST_TIMED_S = TIMED_S / 8  # of a mask; so no more than eight are timed in a step
# After a fill that took so long, rows guess for some steps; a guess delays a step by about a tenth
# of that, a quick mask by nothing. They do not for as many steps if guesses save less than half.
GUESS_S, NUM_GUESSES = 0.003, 128


@dataclass(slots=True)
class GrammarPlace:
    """A sequence's position in its grammar."""

    building: Future[Matcher]
    num_read: int  # number of output tokens read, by the fills that are ordered so far
    draws_from_all: bool = True  # no filter, whose choice would depend on the mask
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
        with grammars.FailuresAs(BadGrammar, "it cannot be followed"):
            read_tokens(matcher, token_ids)
        return matcher


class Guesses:
    """The tokens that a step's rows draw without masks, on their way to the thread that fills.

    The thread that launches brings them, or gives up; one of both, or that thread waits for ever.
    """

    def __init__(self) -> None:
        self._reading: Future[Callable[[], IntColumn] | None] = Future()

    def bring(self, read: Callable[[], IntColumn]) -> None:
        """`read` waits for them: one of each row [G]; below 0: the row has none."""
        self._reading.set_result(read)

    def give_up(self) -> None:
        """They will not come, unless they are brought already."""
        if not self._reading.done():
            self._reading.set_result(None)

    def wait(self) -> IntColumn | None:
        """The tokens [G]; None: masks must be filled."""
        read = self._reading.result()
        return None if read is None else read()


class MaskFiller:
    """The threads that fill masks. To be called from one thread."""

    def __init__(self) -> None:
        self.last_fill_s = 0.0  # what the newest masks took, without waits
        self._timer = large_stack_threads(1, "grammar-time", is_nice=False)
        self._executor: llguidance.LLExecutor | None = None
        self._num_to_time = 0  # fills whose masks are timed
        self._timed_s = TIMED_S  # the mean of the masks timed last
        self._full_s = 0.0  # what the newest masks took of a step in which no row guessed
        self._num_to_guess = 0  # steps in which rows guess; below 0: in which they do not

    @property
    def wants_guesses(self) -> bool:
        """True if rows should guess in the next step. From any thread."""
        return self._num_to_guess > 0

    def fill(
        self,
        places: Sequence[GrammarPlace],
        unread: Sequence[IntColumn],
        masks: NDArray[np.int32],
        guesses: Guesses | None = None,
    ) -> dict[int, str]:
        """Has each place read its tokens and fills its mask, a line of masks [G, words].

        Returns the reason for each that cannot go on, by index; its mask is 0.
        """
        problems: dict[int, str] = {}
        began_cpu_s = time.thread_time()
        matchers = _advanced(places, unread, problems)
        healthy = {index: m for index, m in matchers.items() if not m.is_error()}
        spent_s = time.thread_time() - began_cpu_s
        guessing: dict[int, Matcher] = {}
        if guesses is not None:
            guessing = {i: m for i, m in healthy.items() if places[i].draws_from_all}
        others = {index: m for index, m in healthy.items() if index not in guessing}
        spent_s += self._fill_healthy(places, others, masks, problems)
        if guesses is not None:
            spent_s += self._fill_guessed(places, guessing, guesses, masks, problems)
        else:
            self._full_s = spent_s
            if self._num_to_guess < 0:
                self._num_to_guess += 1
            elif spent_s > GUESS_S:
                self._num_to_guess = NUM_GUESSES
        self.last_fill_s = spent_s
        self._num_to_time = NUM_TIMED_FILLS if spent_s > SLOW_FILL_S else self._num_to_time - 1
        for index, matcher in matchers.items():
            if matcher.is_error():
                problems[index] = grammars.problem_of(matcher)
        masks[list(problems)] = 0  # a row without a token ends
        return problems

    def _fill_guessed(
        self,
        places: Sequence[GrammarPlace],
        matchers: Mapping[int, Matcher],
        guesses: Guesses,
        masks: NDArray[np.int32],
        problems: dict[int, str],
    ) -> float:
        """The masks of rows that guess; returns the seconds from the guesses on."""
        tokens = guesses.wait()
        began_s = time.perf_counter()
        accepted: set[int] = set()
        if tokens is not None:
            accepted = _accepted(matchers, tokens)
            _allow_alone(masks, list(accepted), tokens)
        rejected = {index: m for index, m in matchers.items() if index not in accepted}
        self._fill_healthy(places, rejected, masks, problems)
        took_s = time.perf_counter() - began_s
        self._num_to_guess -= 1
        if took_s > self._full_s / 2:
            self._num_to_guess = -NUM_GUESSES
        return took_s

    def _fill_healthy(
        self,
        places: Sequence[GrammarPlace],
        matchers: Mapping[int, Matcher],
        masks: NDArray[np.int32],
        problems: dict[int, str],
    ) -> float:
        """Fills the masks of rows, by index; some are timed while the others are filled.

        Returns the seconds that it took.
        """
        began_s = time.perf_counter()
        timed = self._to_time(places, matchers)
        timing = None
        if timed:
            timing = self._timer.submit(self._fill_timed, places, matchers, timed, masks)
        others = [(m, index) for index, m in matchers.items() if index not in timed]
        self._fill_together(others, masks, problems)
        if timing is not None:
            problems.update(timing.result())
        return time.perf_counter() - began_s

    def _to_time(
        self, places: Sequence[GrammarPlace], matchers: Mapping[int, Matcher]
    ) -> list[int]:
        """The rows whose masks are to be timed now.

        Rows timed least often come first, of these those with the shortest outputs, so each has its
        turn, and a new one soon.
        """
        if self._num_to_time <= 0:
            return []
        order = sorted(matchers, key=lambda i: (places[i].num_timed, places[i].num_read))
        return order[: max(1, int(TIMED_S / self._timed_s))]

    def _fill_together(
        self, rows: list[tuple[Matcher, int]], masks: NDArray[np.int32], problems: dict[int, str]
    ) -> None:
        """Fills the masks of rows (matcher, index), on several threads if there are several."""
        if len(rows) > 1:
            with suppress(BadGrammar), grammars.FailuresAs(BadGrammar, "masks cannot be filled"):
                llguidance.numpy.fill_next_token_bitmask_par(self._threads(), rows, masks)
                return
        for matcher, index in rows:  # a panic of several does not say which of them it was
            try:
                _fill_one(matcher, masks, index)
            except BadGrammar as error:
                problems[index] = str(error)

    def _fill_timed(
        self,
        places: Sequence[GrammarPlace],
        matchers: Mapping[int, Matcher],
        timed: Sequence[int],
        masks: NDArray[np.int32],
    ) -> dict[int, str]:
        """Fills and times the masks of rows; the problems of those that have taken too long."""
        problems: dict[int, str] = {}
        began_s = time.thread_time()
        for index in timed:
            before_s = time.thread_time()
            try:
                _fill_one(matchers[index], masks, index)
                places[index].spend(time.thread_time() - before_s)
            except BadGrammar as error:
                problems[index] = str(error)
        self._timed_s = max((time.thread_time() - began_s) / len(timed), LEAST_TIMED_S)
        return problems

    def _threads(self) -> llguidance.LLExecutor:
        if self._executor is None:
            set_native_stack()
            cores = os.cpu_count() or 1
            num_threads = max(min(cores, ALL_CORES), min(cores - FREE_CORES, MAX_THREADS))
            self._executor = llguidance.LLExecutor(num_threads)
        return self._executor


def _advanced(
    places: Sequence[GrammarPlace], unread: Sequence[IntColumn], problems: dict[int, str]
) -> dict[int, Matcher]:
    """The matchers that have read their tokens, by index; the others are problems."""
    matchers: dict[int, Matcher] = {}
    for index, (place, token_ids) in enumerate(zip(places, unread, strict=True)):
        try:
            matchers[index] = place.read(token_ids.tolist())
        except (BadGrammar, grammars.BadVocabulary) as error:
            problems[index] = str(error)
    return matchers


def _accepted(matchers: Mapping[int, Matcher], tokens: IntColumn) -> set[int]:
    """The rows whose grammars accept their guesses; no matcher moves."""
    accepted = set()
    for index, token in zip(matchers, tokens[list(matchers)].tolist(), strict=True):
        with suppress(BadGrammar), grammars.FailuresAs(BadGrammar, "a guess cannot be read"):
            if token >= 0 and matchers[index].validate_tokens([token]) == 1:
                accepted.add(index)
    return accepted


def _allow_alone(masks: NDArray[np.int32], rows: list[int], tokens: IntColumn) -> None:
    """Lets each of these rows take one token."""
    masks[rows] = 0
    words, bits = np.divmod(tokens[rows], 32)
    masks.view(np.uint32)[rows, words] = np.uint32(1) << bits.astype(np.uint32)


def _fill_one(matcher: Matcher, masks: NDArray[np.int32], index: int) -> None:
    """Raises BadGrammar if the library cannot."""
    with grammars.FailuresAs(BadGrammar, "its mask cannot be filled"):
        llguidance.numpy.fill_next_token_bitmask(matcher, masks, index)


def read_tokens(matcher: Matcher, token_ids: Sequence[int]) -> None:
    """Advances a matcher; what follows its end is not read."""
    for token_id in token_ids:
        if matcher.is_stopped():  # complete: only end-of-sequence is allowed
            return
        matcher.consume_token(token_id)
