"""Says for which rows the worker's draft model drafts, and how far.

It learns from answers alone: how often drafts came true, and what steps took with them and without.
Rows whose drafts do not pay are left alone, so that the draft model costs them nothing; from time
to time a step is made the other way, since what was measured may have changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler_svc.core import Drafts, Scheduler, Sequence
from scheduler_svc.core.step.plan import NO_DRAFTS, WorkerDraft
from scheduler_svc.speculation.acceptance import Verified
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.lengths import choose_rounds
from scheduler_svc.speculation.model_costs import ModelCosts
from scheduler_svc.speculation.options import SpeculationOptions
from scheduler_svc.speculation.step_drafter import CameOfDrafts, StepDrafter

_AT_FIRST = 0.7  # the probability that a draft comes true, before any was verified
_FADE, _FADE_OF_ALL = 0.9, 0.99  # of a request's and of the mean one, with each new draft
_LEAST = 0.2  # below it a request's drafts are not worth a row of the batch
_FORESEEN = 256  # tokens of a request that may yet come, at most: many end before their limit
_PERIODS = (8, 64)  # steps with drafts before one without: at first, and in the end
_TRIED = 2  # steps with drafts that only try: in the first the draft model catches up
_TRIED_SHARE = 0.01  # of the time that steps without drafts take


@dataclass(slots=True)
class _Course:
    """The draft model's work for one request."""

    probability: float
    num_drafted_at: int = 0  # tokens that the draft model has computed

    def lag(self, num_known: int) -> int:
        """Tokens that it would have to compute before it drafts."""
        return num_known - self.num_drafted_at


class ModelDrafter(StepDrafter):
    """The drafts of one core, made by its worker."""

    def __init__(self, options: SpeculationOptions, core: Scheduler) -> None:
        super().__init__(options, core)
        self._courses: dict[Sequence, _Course] = {}
        self._probability = _AT_FIRST  # of all requests
        self._costs = ModelCosts()
        self._with_drafts = False  # the last step
        self._num_alike = 0  # steps, of which the last was one, as it was
        self._num_to_try = 0  # steps of the last try that are to come
        self._plain_s = 0.0  # that steps without drafts took since the last with them
        self._period = _PERIODS[0]

    def stepped(self, done: AnsweredStep) -> None:
        """Takes note of a step that was answered, and of what it took."""
        plan = done.plan
        came = [one for one in self.came(plan) if one.sequence in self._courses]
        num_read = self._num_read(came)
        verified = {one.slot: self._verified(one) for one in came}
        if done.is_decode:
            self._count(done)
            if plan.drafts:
                self._costs.observe_drafts(done, num_read, self._num_alike <= _TRIED)
            else:
                self._costs.observe_plain(done, self.has_waited(plan))
        prices = self._costs.of(len(plan.slots), len(plan.drafts))
        if num_read and prices is not None:
            # To read a request was weighed when it was begun; it is no loss of each step.
            num_drafted = sum(map(len, plan.drafts.values()))
            done = replace(done, period_s=min(done.period_s, prices.drafted_s(num_drafted)))
        self.learn(done, verified, prices)

    def _count(self, done: AnsweredStep) -> None:
        """Counts steps that are alike, and those of a try."""
        with_drafts = bool(done.plan.drafts)
        if with_drafts is not self._with_drafts:
            self._num_alike, self._with_drafts, self._plain_s = 0, with_drafts, 0.0
            self._period = min(2 * self._period, _PERIODS[1])
        self._num_alike += 1
        if with_drafts:
            self._num_to_try = max(self._num_to_try - 1, 0)
        else:
            self._plain_s += done.duration_s

    def drafts(self) -> Drafts:
        """The drafts that pay, or now and then some to see whether they do."""
        running, limit = self._core.view.running, self._options.disable_by_batch_size
        if not running or (limit and len(running) >= limit):
            return NO_DRAFTS
        self._courses = {s: self._courses.get(s) or self._begun(s) for s in running}
        decoding = [s for s in running if self._decodes(s)]
        likely = [s for s in decoding if self._courses[s].probability >= _LEAST]
        drafts = self._paying(likely, len(running))
        if not drafts:
            return self._tried(decoding)
        if not self._with_drafts or self._num_alike < self._period:
            return drafts
        if not self._core.num_in_flight:  # once, not for each step that is planned ahead
            self._num_alike = 0
        return NO_DRAFTS

    def _begun(self, sequence: Sequence) -> _Course:
        assert sequence.slot is not None
        self.begin(sequence.slot)
        return _Course(self._probability)

    def _paying(self, likely: list[Sequence], num_rows: int) -> Drafts:
        length, saved_s = self._length(likely, num_rows)
        worthwhile = [s for s in likely if self._is_worthwhile(s, saved_s, num_rows)]
        if len(worthwhile) < len(likely):
            length, _ = self._length(worthwhile, num_rows)
        return _asked(worthwhile, length)

    def _length(self, drafting: list[Sequence], num_rows: int) -> tuple[int, float]:
        """The number of drafts of each of these requests, and the seconds saved for each token."""
        prices = self._costs.of(num_rows, len(drafting))
        if prices is None or not drafting:
            return 0, 0.0
        rows = self.rows(drafting, [self._courses[s].probability for s in drafting])
        length = choose_rounds(rows, prices)
        num_tokens = num_rows + float(rows.gains[:, :length].sum())
        step_s = prices.drafted_s(length * len(drafting))
        return length, prices.plain_s - step_s * num_rows / num_tokens

    def _is_worthwhile(self, sequence: Sequence, saved_s: float, num_rows: int) -> bool:
        """True if a request's drafts save more than it takes the draft model to read its tokens.

        Meanwhile all rows wait.
        """
        num_left = min(sequence.max_len - self._core.view.num_tokens(sequence), _FORESEEN)
        return num_left * saved_s > num_rows * self._reading_s(sequence)

    def _reading_s(self, sequence: Sequence) -> float:
        """Seconds in which the draft model reads what it has not of a request, as far as known."""
        lag = self._courses[sequence].lag(self._core.view.num_tokens(sequence))
        return self._costs.reading_s(lag if self._is_behind(lag) else 0)

    def _is_behind(self, lag: int) -> bool:
        """True if it reads more than a row that drafts in each step."""
        return lag > self._options.num_speculative_tokens + 1

    def _tried(self, decoding: list[Sequence]) -> Drafts:
        """Drafts for the one request of which the draft model has the fewest tokens to read.

        None while that would take more than a small share of the time since the last ones.
        """
        prices = self._costs.of(self._core.num_running, 1)
        if not decoding or prices is None:  # nothing to compare them with yet
            return NO_DRAFTS
        num_known, length = self._core.view.num_tokens, self._options.num_speculative_tokens
        nearest = min(decoding, key=lambda s: self._courses[s].lag(num_known(s)))
        is_begun = 0 < self._num_to_try < _TRIED
        step_s = max(length * self._costs.round_s(1), prices.plain_s)
        takes_s = self._reading_s(nearest) + _TRIED * step_s
        if not is_begun and takes_s > _TRIED_SHARE * self._plain_s:
            return NO_DRAFTS
        if not is_begun:
            self._num_to_try = _TRIED
        course = self._courses[nearest]
        course.probability = max(course.probability, self._probability)
        return _asked([nearest], length)

    def _decodes(self, sequence: Sequence) -> bool:
        """True if drafts may be made for it now."""
        assert sequence.slot is not None
        return sequence.request.takes_drafts and not self._core.view.is_prefilling[sequence.slot]

    def _num_read(self, came: list[CameOfDrafts]) -> int:
        """Tokens that the draft model read for rows that it had not drafted for at once before."""
        lags = [self._courses[one.sequence].lag(one.num_known) for one in came]
        return sum(lag for lag in lags if self._is_behind(lag))

    def _verified(self, one: CameOfDrafts) -> Verified:
        """Takes note of what came of a request's drafts."""
        course, came = self._courses[one.sequence], (one.num_drafts, one.num_accepted)
        verified = Verified(course.probability, *came)
        course.probability = _after(course.probability, _FADE, *came)
        self._probability = _after(self._probability, _FADE_OF_ALL, *came)
        course.num_drafted_at = one.num_known + min(one.num_accepted, one.num_drafts - 1)
        return verified


def _asked(sequences: Iterable[Sequence], length: int) -> Drafts:
    """Asks the worker for so many drafts of each of these requests."""
    if not length:
        return NO_DRAFTS
    draft = WorkerDraft(length)
    return {s.slot: draft for s in sequences if s.slot is not None}


def _after(probability: float, fade: float, num_drafted: int, num_accepted: int) -> float:
    """The probability that a draft comes true, after one more: up to the first that did not."""
    for place in range(min(num_accepted + 1, num_drafted)):
        probability = fade * probability + (1 - fade) * (place < num_accepted)
    return probability
