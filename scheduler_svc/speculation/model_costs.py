"""Costs of a worker's draft model, from steps with its drafts and without.

It drafts in rounds, one token of each row in a round. What a step with drafts takes in addition is
shared out among its rounds: the rounds themselves, the tokens that are verified, and the wait.
"""

from dataclasses import dataclass

from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.pay import StepCosts
from scheduler_svc.speculation.prices import PlainSteps, StepPrices

_FADE = 0.9  # of what it takes to read a token, with each step in which some were read


@dataclass(frozen=True, slots=True)
class _CatchUp:
    """A step in which the draft model read tokens before it drafted."""

    extra_s: float
    num_rounds: int
    num_read: int

    def lag_s(self, round_s: float) -> float:
        """Seconds for each token read, if a round took so long."""
        return max(self.extra_s - self.num_rounds * round_s, 0.0) / self.num_read


class ModelCosts:
    """The costs of one core's steps."""

    def __init__(self) -> None:
        self._plain = PlainSteps()
        self._rounds = StepCosts()  # by the number of rows that draft
        self._lag_s: float | None = None  # to read a token; None: not measured yet
        self._caught_up: _CatchUp | None = None  # until it is known what a round takes

    def observe_plain(self, done: AnsweredStep, has_waited: bool) -> None:
        """Takes note of a step without drafts; `has_waited`: it began late for drafts' sake."""
        self._plain.observe(done, has_waited)

    def observe_drafts(self, done: AnsweredStep, num_read: int, is_rare: bool) -> None:
        """Takes note of a step with drafts, before which the model read so many tokens.

        0: none but those that it always reads. `is_rare`: what was measured before may be old.
        """
        plan = done.plan
        num_drafting, num_rounds = len(plan.drafts), max(map(len, plan.drafts.values()))
        plain_s, round_s = self._plain.of(len(plan.slots)), self._rounds.of(num_drafting)
        if plain_s is None:
            return
        extra_s = max(done.period_s - plain_s, 0.0)
        if num_read:
            self._caught_up = _CatchUp(extra_s, num_rounds, num_read)
        elif is_rare:
            self._rounds.observe_best(num_drafting, extra_s / num_rounds)
        else:
            if round_s is not None:  # one that was disturbed must not end drafts
                extra_s = min(extra_s, 2 * num_rounds * round_s + plain_s)
            self._rounds.observe(num_drafting, extra_s / num_rounds)
        round_s = self._rounds.of(num_drafting)
        if round_s is not None and self._caught_up is not None:
            lag_s = self._caught_up.lag_s(round_s)
            before = lag_s if self._lag_s is None else self._lag_s
            # Rare, so one that was disturbed must not count for long.
            self._lag_s = min(lag_s, _FADE * before + (1 - _FADE) * lag_s)
            self._caught_up = None

    def round_s(self, num_drafting: int) -> float:
        """Seconds of a round of so many rows; 0 before any was measured."""
        return self._rounds.of(num_drafting) or 0.0

    def reading_s(self, num_tokens: int) -> float:
        """To read so many tokens, as far as known."""
        return num_tokens * (self._lag_s or 0.0)

    def of(self, num_rows: int, num_drafting: int) -> StepPrices | None:
        """The costs of steps of so many rows, some of which draft; None before any was measured."""
        plain_s = self._plain.of(num_rows)
        if plain_s is None:
            return None
        slope_s = self._plain.slope_s(num_rows, plain_s)
        draft_s = self.round_s(num_drafting) / num_drafting if num_drafting else 0.0
        # As long as it is not known better, rows take what drafts do.
        row_s = min(draft_s if slope_s is None else slope_s, plain_s / num_rows)
        return StepPrices(plain_s, row_s, plain_s - row_s * num_rows, 0.0, max(draft_s, row_s))
