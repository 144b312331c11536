"""How fast the worker is, and what that means for those who wait.

Measures steps for the core's forecast and keeps the last forecast for a moment: under overload it
is asked for at every refusal.
"""

from collections.abc import Iterable

from pagewire.v1 import timing_pb2
from rpc.step_pace import StepPace
from scheduler_svc.core import Request, Scheduler, StepPlan
from scheduler_svc.core.forecast import Forecast, forecast
from scheduler_svc.core.step_time import StepTime, StepTimeFit

_FRESH_S = 0.05  # a forecast is used for so long
_UNKNOWN_S = 1.0  # to come again after, before any step was measured
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 600.0
_UNMEASURED_TIMEOUT_S = 60.0  # the least for a step unlike any that the worker has done
_PATIENCE = 10.0  # times the time that a step should take
_GRANT_S = 0.02  # the most that a grant spans: longer steps hide the wire without one
_MARGIN = 1.05  # coming a little late costs less than being refused again


class Pace:
    """Step times in, seconds of waiting out."""

    def __init__(self) -> None:
        self._fit = StepTimeFit()
        self._sizes = StepPace()  # of this worker's steps; what the fit has forgotten is here
        self._last_done_s = 0.0
        self._most_tokens = 0  # of the steps that this worker has done
        self._decode_s: float | None = None  # recent steps of the kind that is granted
        self._forecast: tuple[float, Forecast] | None = None

    def new_worker(self, rehearsed: Iterable[timing_pb2.RehearsedStep] = ()) -> None:
        """The process is another, and ran these steps at its start. Its first ones may take longer
        than they will later."""
        self._sizes = StepPace()
        for step in rehearsed:
            self._sizes.observe(step.num_tokens, step.seconds)
        self._most_tokens = 0
        self._decode_s = None

    @property
    def step_time(self) -> StepTime | None:
        """How long steps take, as far as was seen; None before any was measured."""
        return self._fit.solve()

    def stepped(self, plan: StepPlan, sent_s: float, now_s: float) -> None:
        """A step is done. It began when it was sent, or when the one before it was done."""
        duration_s = now_s - max(sent_s, self._last_done_s)
        self._last_done_s = now_s
        self._most_tokens = max(self._most_tokens, plan.num_tokens)
        self._sizes.observe(plan.num_tokens, duration_s)
        if plan.num_scheduled is None:
            before_s = duration_s if self._decode_s is None else self._decode_s
            self._decode_s = 0.9 * before_s + 0.1 * duration_s
        if not plan.reset:  # the first step on a worker warms it up
            self._fit.observe(plan.num_tokens, int(plan.num_computed.sum()), duration_s)

    def steps_to_grant(self, most: int) -> int:
        """How many decode steps to grant at once; 1 while none was measured, or if they are long.

        A row that stops inside a grant computes in vain, and an arrival waits for the step under
        way: what is granted should hide the way to the worker and no more.
        """
        if self._decode_s is None:
            return 1
        return max(1, min(most, int(_GRANT_S / max(self._decode_s, 1e-6))))

    def timeout_s(self, plan: StepPlan, least_s: float) -> float:
        """How long a step may take before the worker counts as hung: a long prompt is no hang."""
        step_time, num_tokens = self.step_time, plan.num_tokens
        expected_s = self._sizes.expected_s(num_tokens) or 0.0
        if step_time is not None:
            expected_s = max(expected_s, step_time.of(num_tokens, int(plan.num_computed.sum())))
        if step_time is None or num_tokens > 2 * self._most_tokens:
            least_s = max(least_s, _UNMEASURED_TIMEOUT_S)
        return max(least_s, _PATIENCE * expected_s)

    def gave_up(self, plan: StepPlan, after_s: float) -> None:
        """A step was given up. If its worker ends it after all, the next like it has twice as
        long: it was slow and did not hang."""
        self._sizes.observe(plan.num_tokens, 2 * after_s / _PATIENCE)

    def backlog_s(self, core: Scheduler, now_s: float) -> float | None:
        """Seconds until everyone who is live has ended; None before any step was measured."""
        foreseen = self._foresee(core, now_s)
        return None if foreseen is None else foreseen.drained_s

    def retry_after_s(self, core: Scheduler, request: Request, now_s: float) -> float:
        """In how many seconds there will be room for a refused request."""
        foreseen = self._foresee(core, now_s)
        if foreseen is None:
            return _UNKNOWN_S
        admitted_s = foreseen.nth_admission_s(core.intake.num_ahead(request))
        return min(max(_MARGIN * admitted_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def _foresee(self, core: Scheduler, now_s: float) -> Forecast | None:
        if self._forecast is not None and now_s - self._forecast[0] < _FRESH_S:
            return self._forecast[1]
        step_time = self.step_time
        if step_time is None:
            return None
        found = forecast(core, step_time)
        self._forecast = now_s, found
        return found
