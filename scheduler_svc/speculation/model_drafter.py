"""Says for which rows the worker's draft model drafts, and how far.

It learns from answers alone: how often drafts came true, and what steps took with them and without.
Rows whose drafts do not pay are left alone, so that the draft model costs them nothing; from time
to time a step is made the other way, since what was measured may have changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core import Drafts, Scheduler, Sequence, StepPlan
from scheduler_svc.core.step.plan import NO_DRAFTS, WorkerDraft
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.options import SpeculationOptions
from scheduler_svc.speculation.pay import Batch, StepCosts, best_choice

_AT_FIRST = 0.7  # the probability that a draft comes true, before any was verified
_FADE = 0.9  # of it, with each new draft
_LEAST = 0.2  # below it a request's drafts are not worth a row of the batch
_LEAST_SAVED = (
    0.1  # of a token's time: less may be noise, and to begin costs the reading of prompts
)
_FORESEEN = 256  # tokens of a request that may yet come, at most: many end before their limit
_PERIODS = (8, 64)  # steps with drafts before one without: at first, and in the end
_TRIED = 2  # steps with drafts that only try: in the first the draft model catches up
_TRIED_SHARE = 0.01  # of the time that steps without drafts take


@dataclass(slots=True)
class _Course:
    """What the draft model did for one request."""

    probability: float
    num_drafted_at: int = 0  # tokens that the draft model has computed

    def lag(self, num_known: int) -> int:
        """Tokens that it would have to compute before it drafts."""
        return num_known - self.num_drafted_at


@dataclass(frozen=True, slots=True)
class _CatchUp:
    """A step in which the draft model read tokens before it drafted."""

    extra_s: float
    num_drafted: int
    num_read: int

    def lag_s(self, draft_s: float) -> float:
        """Seconds for each token read, if a draft took so long."""
        return max(self.extra_s - self.num_drafted * draft_s, 0.0) / self.num_read


class ModelDrafter:
    """The drafts of one core, made by its worker; belongs to the event loop's thread."""

    def __init__(self, options: SpeculationOptions, core: Scheduler) -> None:
        self._options = options
        self._core = core
        self._courses: dict[Sequence, _Course] = {}
        self._probability = _AT_FIRST  # of all requests
        self._plain = StepCosts()  # of the target's pass, by its number of tokens
        self._drafting = StepCosts()  # of one draft of each row, by the number of rows
        self._lag_s: float | None = None  # to catch up by one token; None: not measured yet
        self._caught_up: _CatchUp | None = None  # until it is known what drafts take
        self._with_drafts = False  # the last step
        self._num_alike = 0  # steps, of which the last was one, as it was
        self._num_tried = _TRIED  # steps of the last try that were answered
        self._plain_s = 0.0  # that steps without drafts took since the last with them
        self._period = _PERIODS[0]

    def stepped(self, done: AnsweredStep) -> None:
        """Takes note of a step that was answered, and of what it took."""
        plan, duration_s = done.plan, done.duration_s
        lags = self._verified(plan) if plan.drafts else []
        if not done.is_decode:
            return
        with_drafts = bool(plan.drafts)
        if with_drafts is not self._with_drafts:
            self._num_alike, self._with_drafts, self._plain_s = 0, with_drafts, 0.0
            self._period = min(2 * self._period, _PERIODS[1])
        self._num_alike += 1
        if with_drafts:
            self._num_tried = self._num_tried % _TRIED + 1
        else:
            self._plain_s += duration_s
            self._plain.observe(plan.num_tokens, duration_s)
            return
        extra_s = max(duration_s - (self._plain.of(plan.num_tokens) or duration_s), 0.0)
        self._learn_costs(plan, extra_s, lags)

    def _learn_costs(self, plan: StepPlan, extra_s: float, lags: list[int]) -> None:
        """Of a step with drafts, from the seconds that it took beyond the target's pass."""
        longest = max(map(len, plan.drafts.values()))
        if max(lags, default=0) <= self._options.num_speculative_tokens + 1:
            observe = self._drafting.observe
            if self._num_alike <= _TRIED:  # rare: what was worse before was perhaps disturbed
                observe = self._drafting.observe_best
            observe(len(plan.drafts), extra_s / longest)
        elif sum(lags):
            self._caught_up = _CatchUp(extra_s, longest, sum(lags))
        draft_s, caught_up = self._drafting.of(len(plan.drafts)), self._caught_up
        if draft_s is not None and caught_up is not None:
            self._lag_s = _mean(self._lag_s, caught_up.lag_s(draft_s))
            self._caught_up = None

    def propose(self) -> Drafts:
        """Drafts by slot, for the rows whose drafts pay; none for all others."""
        running, limit = self._core.view.running, self._options.disable_by_batch_size
        if not running or (limit and len(running) >= limit):
            return NO_DRAFTS
        self._courses = {s: self._courses.get(s) or _Course(self._probability) for s in running}
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

    def _paying(self, likely: list[Sequence], num_rows: int) -> Drafts:
        length, saved_s = self._best(likely, num_rows)
        worthwhile = [s for s in likely if self._is_worthwhile(s, saved_s)]
        if len(worthwhile) < len(likely):
            length, _ = self._best(worthwhile, num_rows)
        return self._ask(worthwhile, length)

    def _best(self, drafting: list[Sequence], num_rows: int) -> tuple[int, float]:
        """The length that pays most, and the seconds that it saves for each token of a row."""
        if not drafting:
            return 0, 0.0
        mean = sum(self._courses[s].probability for s in drafting) / len(drafting)
        batch, most = Batch(num_rows, len(drafting), mean), self._options.num_speculative_tokens
        draft_s = self._drafting.of(len(drafting)) or 0.0
        choice = best_choice(batch, most, self._plain, draft_s)
        if choice.saved_s < _LEAST_SAVED * (self._plain.of(num_rows) or 0.0):
            return 0, 0.0
        return choice.length, choice.saved_s

    def _is_worthwhile(self, sequence: Sequence, saved_s: float) -> bool:
        """Whether a request's drafts save more than it takes the draft model to read its tokens."""
        num_left = min(sequence.max_len - self._core.view.num_tokens(sequence), _FORESEEN)
        return num_left * saved_s > self._catch_up_s(sequence)

    def _catch_up_s(self, sequence: Sequence) -> float:
        """What it takes the draft model to read what it has not of a request, as far as known."""
        lag = self._courses[sequence].lag(self._core.view.num_tokens(sequence))
        return lag * (self._lag_s or 0.0)

    def _tried(self, decoding: list[Sequence]) -> Drafts:
        """Drafts for the one request of which the draft model has the fewest tokens to read.

        None while that would take more than a small share of the time since the last ones.
        """
        if not decoding or self._plain.of(1) is None:  # nothing to compare them with yet
            return NO_DRAFTS
        num_known, length = self._core.view.num_tokens, self._options.num_speculative_tokens
        nearest = min(decoding, key=lambda s: self._courses[s].lag(num_known(s)))
        begun = self._num_tried < _TRIED  # other rows may have gone on in a step between
        draft_s = self._drafting.of(1) or 0.0
        takes_s = self._catch_up_s(nearest) + _TRIED * length * draft_s
        if not begun and takes_s > _TRIED_SHARE * self._plain_s:
            return NO_DRAFTS
        course = self._courses[nearest]
        course.probability = max(course.probability, self._probability)
        return self._ask([nearest], length)

    def _ask(self, sequences: Iterable[Sequence], length: int) -> Drafts:
        if not length:
            return NO_DRAFTS
        draft = WorkerDraft(length)
        return {s.slot: draft for s in sequences if s.slot is not None}

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether drafts may be made for it now."""
        assert sequence.slot is not None
        return sequence.request.takes_drafts and not self._core.view.is_prefilling[sequence.slot]

    def _verified(self, plan: StepPlan) -> list[int]:
        """Learns from the drafts of a step; returns each row's lag when it was planned."""
        lags = []
        known_before = dict(zip(plan.slots.tolist(), plan.num_computed + 1, strict=True))
        for slot, draft in plan.drafts.items():
            sequence = self._core.view.sequence_in(slot)
            course = None if sequence is None else self._courses.get(sequence)
            if sequence is None or course is None:  # it has ended
                continue
            before, now = int(known_before[slot]), self._core.view.num_tokens(sequence)
            num_accepted = max(now - before - 1, 0)
            lags.append(course.lag(before))
            course.probability = _after(course.probability, len(draft), num_accepted)
            self._probability = _after(self._probability, len(draft), num_accepted)
            course.num_drafted_at = before + min(num_accepted, len(draft) - 1)
        return lags


def _after(probability: float, num_drafted: int, num_accepted: int) -> float:
    """The probability that a draft comes true, after one more: up to the first that did not."""
    for place in range(min(num_accepted + 1, num_drafted)):
        probability = _mean(probability, float(place < num_accepted))
    return probability


def _mean(before: float | None, value: float) -> float:
    """The mean of values, in which those before fade."""
    return value if before is None else _FADE * before + (1 - _FADE) * value
