"""Whether rows get on faster with drafts than without, by trying both.

A step with drafts is awaited before the next one is planned, and what that takes shows in nothing
but the pace: to look tokens up, to plan and to send while the worker idles. So steps come in
stretches with drafts and without, and the tokens a second of each decide. Only whether drafts are
made depends on it, never which tokens come.
"""

from dataclasses import dataclass, field

from scheduler_svc.core import StepPlan

_SETTLING, _COUNTED = 2, 8  # steps of a stretch: the first may still be of the kind before
_MOST_RESTS = 64  # stretches without drafts before they are tried again
_SHARE_OF_NEW = 0.5  # of a pace: what is repeated now may not be later


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """A step that was answered."""

    plan: StepPlan
    duration_s: float  # from when it was sent or the step before was answered, the later of both
    period_s: float  # since the step before was answered
    num_tokens: int  # that came

    @property
    def is_decode(self) -> bool:
        """Whether it computed tokens that were sampled, and nothing else."""
        plan = self.plan
        return bool(plan.num_tokens) and not plan.num_prefill_tokens and not plan.reset


@dataclass(slots=True)
class _Stretch:
    """Steps of one kind, one after the other."""

    num_steps: int = 0
    num_drafted: int = 0  # of those that count
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, done: AnsweredStep) -> None:
        self.num_steps += 1
        if self.num_steps > _SETTLING:
            self.num_drafted += bool(done.plan.drafts)
            self.num_tokens += done.num_tokens
            self.seconds += done.period_s

    @property
    def is_over(self) -> bool:
        return self.num_steps == _SETTLING + _COUNTED

    @property
    def pace(self) -> float:
        """Tokens a second."""
        return self.num_tokens / max(self.seconds, 1e-9)


@dataclass(slots=True)
class _Paces:
    """What was measured with about so many rows, and what kind of stretch is next."""

    drafted: float | None = None
    plain: float | None = None
    is_drafting: bool = True
    num_left: int = _MOST_RESTS  # stretches before the other kind
    num_rests: int = 1  # stretches without drafts after the next one that lost
    stretch: _Stretch = field(default_factory=_Stretch)

    def end(self) -> None:
        """Takes note of the stretch, and begins the next one."""
        done, self.stretch = self.stretch, _Stretch()
        if self.is_drafting:
            if 2 * done.num_drafted >= _COUNTED:
                self.drafted = _mean(self.drafted, done.pace)
                self._judge(self.drafted)
            return
        self.plain = _mean(self.plain, done.pace)
        self.num_left -= 1
        if self.num_left <= 0:
            self.is_drafting, self.num_left = True, _MOST_RESTS

    def _judge(self, drafted: float) -> None:
        """After a stretch with drafts."""
        self.num_left -= 1
        if self.plain is not None and drafted < self.plain:
            self.is_drafting, self.num_left = False, self.num_rests
            self.num_rests = min(2 * self.num_rests, _MOST_RESTS)
            return
        self.num_rests = 1
        if self.plain is None or self.num_left <= 0:
            self.is_drafting, self.num_left = False, 1


class DraftTrial:
    """Of one core's steps, apart for each power of two of running rows."""

    def __init__(self) -> None:
        self._paces: dict[int, _Paces] = {}
        self._last: _Paces | None = None

    def allows(self, num_rows: int) -> bool:
        """Whether drafts may be made now."""
        return self._of(num_rows).is_drafting

    def stepped(self, done: AnsweredStep, num_rows: int) -> None:
        """Takes note of a step, when so many rows run."""
        paces = self._of(num_rows)
        if paces is not self._last or not done.is_decode:
            paces.stretch = _Stretch()  # what takes part of it does not count
            self._last = paces
        if done.is_decode:
            paces.stretch.add(done)
            if paces.stretch.is_over:
                paces.end()

    def _of(self, num_rows: int) -> _Paces:
        return self._paces.setdefault(num_rows.bit_length(), _Paces())


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _SHARE_OF_NEW * (new - before)
