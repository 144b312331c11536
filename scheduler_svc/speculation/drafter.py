"""Proposes drafts for the running requests of one core, and learns which come true.

What a request's tokens predict is compared with what came, whether it was drafted or not. So a
request whose tokens are not foreseen is planned as if there were no speculation, and drafts begin
once its predictions come true. Whether they do changes when tokens come, never which.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import Drafts, Scheduler, Sequence, Status, StepPlan
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.speculation.acceptance import Verified
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.lengths import choose_lengths
from scheduler_svc.speculation.lookup import look_up, look_up_rows
from scheduler_svc.speculation.options import SpeculationOptions
from scheduler_svc.speculation.past_outputs import PastOutputs
from scheduler_svc.speculation.prices import Prices
from scheduler_svc.speculation.step_drafter import StepDrafter

_AT_FIRST = 0.45  # the probability that a prediction comes true, before any was seen
_FADE = 0.85  # of it, with each new prediction
_LEAST = 0.4  # below it a request is only watched, whatever a step costs


# Tokens that may follow the first so many of a sequence, all of which are known; often none.
Predict = Callable[[Sequence, int], TokenIds]


def _nothing() -> TokenIds:
    return np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class _Course:
    """The success with which one request's tokens predict the next ones."""

    num_seen: int  # tokens
    probability: float = _AT_FIRST
    predicted: TokenIds = field(default_factory=_nothing)  # after those seen
    is_fresh: bool = False  # looked up after all the tokens seen

    def compare(self, came: TokenIds) -> None:
        """Takes note of tokens that came after those seen."""
        self.num_seen += len(came)
        self.is_fresh = False
        for token_id, expected in zip(came.tolist(), self.predicted.tolist(), strict=False):
            came_true = token_id == expected
            self.probability = _FADE * self.probability + (1 - _FADE) * came_true
            if not came_true:
                self.predicted = self.predicted[:0]
                return
        self.predicted = self.predicted[len(came) :]


class Drafter(StepDrafter):
    """The drafts of one core; belongs to the event loop's thread."""

    def __init__(
        self, options: SpeculationOptions, core: Scheduler, predict: Predict | None = None
    ) -> None:
        """`predict` stands in for the look-up, where a simulation has no text to look up in."""
        super().__init__(options, core)
        self._predict = predict
        self._courses: dict[Sequence, _Course] = {}
        self._prices = Prices()
        self._past = PastOutputs(
            options.suffix_decoding_max_cached_requests, options.suffix_decoding_max_tree_depth
        )

    def stepped(self, done: AnsweredStep) -> None:
        """Takes note of a step that was answered, and of what it took."""
        verified = self._verified(done.plan) if done.plan.drafts else {}
        if done.is_decode:
            self._prices.observe(done, self.has_waited(done.plan))
        self.learn(done, verified, self._prices.of(len(done.plan.slots)))

    def _verified(self, plan: StepPlan) -> dict[int, Verified]:
        """The fate of a step's drafts, by slot; not of requests that it ended."""
        return {
            one.slot: Verified(course.probability, one.num_drafts, one.num_accepted)
            for one in self.came(plan)
            if (course := self._courses.get(one.sequence)) is not None
        }

    def drafts(self) -> Drafts:
        """The drafts whose predictions pay."""
        self._keep_outputs()
        running, limit = self._core.view.running, self._options.disable_by_batch_size
        if not running or (limit and len(running) >= limit):
            return NO_DRAFTS
        # Also of those that are not watched now: their outputs are kept when they end.
        self._courses = {s: self._courses.get(s) or self._begun(s) for s in running}
        drafting = self._foreseen()
        if not any(self._lengths(drafting)):
            return NO_DRAFTS
        self._look_up(drafting)
        lengths = self._lengths(drafting)  # some may be predicted for fewer tokens
        drafts = {
            s.slot: course.predicted[:length]
            for (s, course), length in zip(drafting.items(), lengths, strict=False)
        }
        return {slot: d for slot, d in drafts.items() if slot is not None and len(d)}

    def _begun(self, sequence: Sequence) -> _Course:
        assert sequence.slot is not None
        self.begin(sequence.slot)
        return _Course(self._num_known(sequence))

    def _lengths(self, drafting: dict[Sequence, _Course]) -> list[int]:
        """The number of drafts of each of these requests."""
        prices = self._prices.of(self._core.num_running)
        if prices is None or not drafting or self._prices.is_stale:
            return []
        rows = self.rows(list(drafting), [course.probability for course in drafting.values()])
        for row, course in enumerate(drafting.values()):
            if course.is_fresh:
                rows.gains[row, len(course.predicted) :] = 0.0
        lengths: list[int] = choose_lengths(rows, prices).tolist()
        return lengths

    def _keep_outputs(self) -> None:
        """Keeps those of requests that have ended, for others to draft from."""
        for sequence in [s for s in self._courses if s.status is Status.FINISHED]:
            self._past.add(sequence)
            del self._courses[sequence]

    def _foreseen(self) -> dict[Sequence, _Course]:
        """The requests whose tokens predict the next ones, and have done so well enough."""
        watched = {s: course for s, course in self._courses.items() if s.request.takes_drafts}
        token_ids = self._core.view.token_ids
        for sequence, course in watched.items():
            num_known = self._num_known(sequence)
            if num_known > course.num_seen:
                course.compare(token_ids[sequence.slot, course.num_seen : num_known])
        self._look_up({s: course for s, course in watched.items() if not len(course.predicted)})
        return {
            s: course
            for s, course in watched.items()
            if len(course.predicted) and course.probability >= _LEAST
        }

    def _look_up(self, courses: dict[Sequence, _Course]) -> None:
        """Finds what the tokens of requests predict now, once for the same tokens."""
        stale = {s: course for s, course in courses.items() if not course.is_fresh}
        predicted = self._predicted(list(stale), [course.num_seen for course in stale.values()])
        for course, tokens in zip(stale.values(), predicted, strict=True):
            course.predicted, course.is_fresh = tokens, True

    def _predicted(self, sequences: list[Sequence], num_known: list[int]) -> list[TokenIds]:
        if self._predict is not None:
            pairs = zip(sequences, num_known, strict=True)
            return [self._predict(sequence, known) for sequence, known in pairs]
        token_ids, slots = self._core.view.token_ids, [s.slot for s in sequences]
        past = [self._past.of(sequence.request) for sequence in sequences]
        if not any(map(len, past)):
            where = np.array(slots, dtype=np.intp), np.array(num_known, dtype=np.intp)
            return look_up_rows(token_ids, *where, self._options)
        rows = zip(slots, num_known, past, strict=True)
        return [look_up(token_ids[slot, :n], self._options, others) for slot, n, others in rows]

    def _num_known(self, sequence: Sequence) -> int:
        return self._core.view.num_tokens(sequence)
