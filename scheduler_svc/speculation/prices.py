"""Times of decode steps, with drafts and without, as lines through what was measured.

A step with drafts is planned when no other is in flight, and awaited before the next one. What that
takes shows in nothing but the time between answers, so it is that time which counts.
"""

from dataclasses import dataclass

from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.pay import StepCosts

_SHARE_OF_NEW = 0.05  # of a step with drafts, in what is expected of the next ones
_LEAST_SPREAD = 4.0  # of numbers of drafts, squared: alike ones do not say what each costs
_TRIED = 3  # steps with drafts that are made before what they take is known; one was not disturbed
_REMEMBERED = 1024  # steps without drafts, before those with them are tried as at first
_MOST_DRAFTING = 100  # steps, before one without drafts is measured again


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Times of steps while so many rows run, in seconds."""

    plain_s: float  # of all rows, without drafts
    row_s: float  # of that, for each row
    fixed_s: float  # of that, however few the rows are
    wait_s: float  # in addition, if there are drafts
    draft_s: float  # in addition, for each draft

    def drafted_s(self, num_drafts: int) -> float:
        """Seconds of all rows, with so many drafts together."""
        return self.plain_s + self.wait_s + num_drafts * self.draft_s


class PlainSteps:
    """Times of steps without drafts, by their number of rows."""

    def __init__(self) -> None:
        self._costs = StepCosts()

    def observe(self, done: AnsweredStep, has_waited: bool) -> None:
        """Takes note of one; `has_waited`: it began late for drafts' sake."""
        seconds = done.duration_s if has_waited else done.period_s
        self._costs.observe(len(done.plan.slots), seconds)

    def of(self, num_rows: int) -> float | None:
        """Seconds of a step of so many rows; None before any was measured."""
        return self._costs.of(num_rows)

    def slope_s(self, num_rows: int, plain_s: float) -> float | None:
        """Seconds that each row adds; None: no step of at most half as many rows was measured."""
        fewest = self._costs.fewest
        if fewest is None or 2 * fewest > num_rows:
            return None
        return max(plain_s - (self._costs.of(fewest) or plain_s), 0.0) / (num_rows - fewest)


class Prices:
    """The prices of one core's steps."""

    def __init__(self) -> None:
        self._plain = PlainSteps()
        # Of steps with drafts: their number of drafts, and what they took beyond plain ones.
        self._mean_drafts = self._mean_s = 0.0
        self._spread = self._slant = 0.0  # of the number of drafts; of the time with it
        self._is_known = False  # what steps with drafts take
        self._tried: list[tuple[float, int]] = []  # before: time beyond a plain step, and drafts
        self._num_drafting = 0  # steps with drafts since the last one without
        self._num_plain = 0  # the other way

    @property
    def is_stale(self) -> bool:
        """True if a step without drafts should be measured again."""
        return self._num_drafting >= _MOST_DRAFTING

    def observe(self, done: AnsweredStep, has_waited: bool) -> None:
        """Takes note of what a decode step took; `has_waited`: it began late for drafts' sake."""
        num_rows, num_drafted = len(done.plan.slots), done.num_drafted
        if not num_drafted:
            self._num_drafting, self._num_plain = 0, self._num_plain + 1
            self._is_known &= self._num_plain < _REMEMBERED
            self._plain.observe(done, has_waited)
            return
        self._num_drafting, self._num_plain = self._num_drafting + 1, 0
        if (plain_s := self._plain.of(num_rows)) is not None:
            self._fit(num_drafted, done.period_s - plain_s, plain_s)

    def of(self, num_rows: int) -> StepPrices | None:
        """The prices of steps while so many rows run; None before any was measured."""
        plain_s = self._plain.of(num_rows)
        if plain_s is None:
            return None
        slope_s = self._plain.slope_s(num_rows, plain_s)
        if not self._is_known:
            row_s = slope_s or 0.0
            return StepPrices(plain_s, row_s, plain_s - row_s * num_rows, 0.0, row_s)
        # As long as it is not known better, drafts take what rows do, or their own time alone.
        likely_s = max(self._mean_s, 0.0) / self._mean_drafts if slope_s is None else slope_s
        draft_s = max(self._slant + _LEAST_SPREAD * likely_s, 0.0) / (self._spread + _LEAST_SPREAD)
        row_s = min(draft_s if slope_s is None else slope_s, plain_s / num_rows)
        wait_s = self._mean_s - draft_s * self._mean_drafts
        return StepPrices(plain_s, row_s, plain_s - row_s * num_rows, wait_s, draft_s)

    def _fit(self, num_drafts: int, extra_s: float, plain_s: float) -> None:
        if not self._is_known:
            self._tried.append((extra_s, num_drafts))
            if len(self._tried) == _TRIED:
                self._is_known = True
                self._mean_s, self._mean_drafts = sorted(self._tried)[_TRIED // 2]
                self._spread = self._slant = 0.0
                self._tried.clear()
            return
        # One that was disturbed must not end drafts.
        extra_s = min(extra_s, 2 * max(self._mean_s, 0.0) + plain_s)
        drafts, seconds = num_drafts - self._mean_drafts, extra_s - self._mean_s
        self._mean_drafts += _SHARE_OF_NEW * drafts
        self._mean_s += _SHARE_OF_NEW * seconds
        kept = 1 - _SHARE_OF_NEW
        self._spread = kept * (self._spread + _SHARE_OF_NEW * drafts * drafts)
        self._slant = kept * (self._slant + _SHARE_OF_NEW * drafts * seconds)
