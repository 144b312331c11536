"""Measures the worker's step times and derives grants, timeouts and waiting times from them.

Feeds the core's forecast and keeps the last forecast for a moment, since overload needs one for
every refusal.
"""

from collections.abc import Iterable

from pagewire.v1 import timing_pb2
from scheduler_svc.core import Request, Scheduler, StepPlan
from scheduler_svc.core.estimate.forecast import Forecast, forecast
from scheduler_svc.core.estimate.step_time import StepTime, StepTimeFit
from scheduler_svc.worker.prompt_pace import PromptPace
from wire.step_pace import StepPace

_FRESH_S = 0.05  # reuse a forecast for this long
_UNKNOWN_S = 1.0  # time to retry after, before any step was measured
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 600.0
_UNMEASURED_TIMEOUT_S = 60.0  # least timeout of a step larger than any measured
_PATIENCE = 10.0  # times the expected step time
_GRANT_S = 0.02  # most time that a grant spans: longer steps hide the wire without one
_MARGIN = 1.05  # a slightly late retry costs less than another refusal


class Pace:
    """Step times in, seconds to wait out."""

    def __init__(self, target_s: float | None = None) -> None:
        self.prompts = PromptPace(target_s)
        self._fit = StepTimeFit()
        self._sizes = StepPace()  # of this worker's steps; what the fit has forgotten is here
        self._last_done_s = 0.0
        self._most_tokens = 0  # of this worker's steps so far
        self._decode_s: float | None = None  # recent decode steps
        self._forecast: tuple[float, Forecast] | None = None

    def new_worker(self, rehearsed: Iterable[timing_pb2.RehearsedStep] = ()) -> None:
        """Forgets the last worker; `rehearsed` are steps that the new process ran at its start.

        The first steps of a new worker process may take longer than later ones.
        """
        self._sizes = StepPace()
        for step in rehearsed:
            self._sizes.observe(step.num_tokens, step.seconds)
        self._most_tokens = 0
        self._decode_s = None
        self.prompts.new_worker()

    @property
    def step_time(self) -> StepTime | None:
        """The fitted step time; None before enough steps were measured."""
        return self._fit.solve()

    @property
    def s_per_token(self) -> float | None:
        """Seconds that a token of a prompt takes in a large step; None where none was measured."""
        step_time, num_tokens = self.step_time, self._most_tokens
        if step_time is None or not num_tokens:
            return None
        return step_time.of(num_tokens, 0) / num_tokens

    def stepped(self, plan: StepPlan, sent_s: float, now_s: float) -> None:
        """Adds a finished step. It began when it was sent, or when the previous one was done."""
        duration_s = now_s - max(sent_s, self._last_done_s)
        self._last_done_s = now_s
        self._most_tokens = max(self._most_tokens, plan.num_tokens)
        self._sizes.observe(plan.num_tokens, duration_s)
        if plan.num_scheduled is None:
            before_s = duration_s if self._decode_s is None else self._decode_s
            self._decode_s = 0.9 * before_s + 0.1 * duration_s
        elif 0 < plan.num_prefill_tokens < plan.num_tokens:  # others decoded
            self.prompts.observe(plan.num_prefill_tokens, duration_s, self._decode_s or 0.0)
        if not plan.reset:  # the first step on a worker warms it up
            self._fit.observe(plan.num_tokens, int(plan.num_computed.sum()), duration_s)

    def steps_to_grant(self, most: int) -> int:
        """Number of decode steps to grant at once, at most `most`; 1 while none is measured.

        A row that stops within a grant computes in vain, and a new request waits for the step in
        progress: a grant should hide the latency to the worker and no more.
        """
        if self._decode_s is None:
            return 1
        return max(1, min(most, int(_GRANT_S / max(self._decode_s, 1e-6))))

    def timeout_s(self, plan: StepPlan, least_s: float) -> float:
        """Seconds after which a step counts as hung; a long prompt gets more."""
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
        """Seconds until all live requests have ended; None before any step was measured."""
        foreseen = self._foresee(core, now_s)
        return None if foreseen is None else foreseen.drained_s

    def retry_after_s(self, core: Scheduler, request: Request, now_s: float) -> float:
        """Seconds until there is room for a refused request."""
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
