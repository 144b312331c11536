"""The production core and a worker that only takes time, under a virtual clock.

Plans, admission, preemption, prefix hits, refusals and drafts are the scheduler's own; a step takes
the modelled time. Nothing waits in real time, so hours pass in seconds, and the same workload
always gives the same numbers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core import (
    Finished,
    FinishReason,
    RefusalKind,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.worker.pace import Pace
from simulator.capacity.coming import Coming
from simulator.capacity.outputs import Outputs
from simulator.capacity.speculation import VirtualSpeculation
from simulator.capacity.timed_worker import TimedWorker, VirtualStep
from simulator.capacity.virtual_tier import VirtualTier
from simulator.capacity.workload import Arrival, BadTrace, Prompts


@dataclass(slots=True)
class RequestOutcome:
    """The result of one request; times are of the virtual clock, in seconds."""

    arrival: Arrival
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    reason: FinishReason | None = None  # None: refused for overload


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of verified drafts, as the core has them."""

    num_verifications: int  # of a row in a step
    num_drafted_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class ServedWorkload:
    """Statistics of a workload that has ended."""

    outcomes: list[RequestOutcome]
    duration_s: float  # until the last end
    busy_s: float  # seconds that the worker spent in steps
    num_steps: int
    num_preemptions: int
    num_prefill_tokens: int
    mean_batch: float  # rows per step, weighted by its duration
    peak_blocks: float  # largest fraction of the KV blocks in use
    max_waiting: int
    drafts: DraftCounts | None  # None: there is no speculation


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step on the worker."""

    sent_s: float
    done_s: float  # when its result arrives
    plan: StepPlan
    step: VirtualStep


class VirtualServer:
    """One worker group's scheduler, from an empty queue to an empty queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        lookahead: int,
        wire_s: float = 0.0,
        target_itl_s: float | None = None,
        speculation: VirtualSpeculation | None = None,
        tier_s_per_block: float = 0.0,
    ) -> None:
        self._pace = Pace(target_itl_s)
        self._lookahead = lookahead
        self._wire_s = wire_s  # one way between scheduler and worker, in seconds
        self._core = Scheduler(config)
        self._tier = VirtualTier(self._core, tier_s_per_block)
        self._prompts = Prompts(config.vocab_size)
        if speculation is None:
            self._drafter, draft_step_time = None, None
            self._outputs = Outputs(config.vocab_size)
        else:
            self._outputs = speculation.outputs(config.vocab_size)
            self._drafter = speculation.drafter(self._core, self._outputs)
            draft_step_time = speculation.draft_step_time
        self._worker = TimedWorker(config, step_time, self._outputs, draft_step_time)
        self._arrivals = Coming(())
        self._in_flight: deque[_InFlight] = deque()
        self._outcomes: list[RequestOutcome] = []
        self._now_s = self._free_at_s = self._busy_s = self._row_s = self._peak_blocks = 0.0
        self._last_done_s = 0.0
        self._max_waiting = 0

    def serve(self, arrivals: Sequence[Arrival]) -> ServedWorkload:
        """Runs until every request has ended. Raises BadTrace for a request that can never run."""
        self._arrivals = Coming(arrivals)
        self._outcomes = [RequestOutcome(arrival) for arrival in arrivals]
        for arrival in arrivals:
            self._outputs.add(arrival)
        while len(self._arrivals) or self._core.num_waiting or self._core.num_running:
            self._now_s = self._next_event_s()
            self._tell_ends(self._core.expire(self._now_s))
            for number, arrival in self._arrivals.take(self._now_s):
                self._submit(number, arrival)
            self._tier.finish(self._now_s)
            has_come = bool(self._in_flight) and self._in_flight[0].done_s <= self._now_s
            if has_come:
                self._take_result()
            # As in the scheduler's process, a request that arrives during a step waits for its end.
            if has_come or not self._in_flight:
                self._plan()
            self._tier.take(self._now_s)
        return self._served()

    # --- events ----------------------------------------------------------------------------------

    def _next_event_s(self) -> float:
        times_s = [] if self._arrivals.next_s is None else [self._arrivals.next_s]
        if self._in_flight:
            times_s.append(self._in_flight[0].done_s)
        times_s += [s for s in (self._core.next_deadline_s, self._tier.next_s) if s is not None]
        if not times_s:
            raise AssertionError(f"{self._core.num_waiting} requests wait for nothing")
        return max(min(times_s), self._now_s)

    def _submit(self, handle: int, arrival: Arrival) -> None:
        self._outcomes[handle].arrival = arrival
        timeout_s, recorded = arrival.timeout_s, arrival.recorded
        request = Request(
            request_id=str(handle),
            prompt_token_ids=self._prompts.of(arrival),
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            handle=handle,
            arrival_s=arrival.arrival_s,
            deadline_s=None if timeout_s is None else arrival.arrival_s + timeout_s,
            priority=arrival.priority,
            tenant=arrival.tenant,
            cache_salt="" if recorded is None else recorded.cache_salt,
            skip_prefix_cache=recorded is not None and recorded.skip_prefix_cache,
            skip_speculation=recorded is not None and not recorded.takes_drafts,
            session=None if recorded is None else recorded.session,
        )
        try:
            self._core.add(request)
        except Refused as refused:
            if refused.kind is not RefusalKind.OVERLOADED:
                raise BadTrace(f"request {handle + 1}: {refused}") from refused
            self._arrivals.ended(handle, self._now_s)
        self._max_waiting = max(self._max_waiting, self._core.num_waiting)

    def _plan(self) -> None:
        """Plans ahead of the results, up to the look-ahead."""
        while (plan := self._next_plan()) is not None:
            step = self._worker.step(plan)
            begin_s = max(self._now_s + self._wire_s, self._free_at_s)
            self._free_at_s = begin_s + step.duration_s
            done_s = self._free_at_s + self._wire_s
            self._in_flight.append(_InFlight(self._now_s, done_s, plan, step))
            self._busy_s += step.duration_s
            self._row_s += step.duration_s * len(plan.slots)
            self._peak_blocks = max(self._peak_blocks, self._core.view.block_usage)

    def _next_plan(self) -> StepPlan | None:
        # As in the scheduler's process, drafts are proposed whether or not there is a step to plan.
        drafts = NO_DRAFTS if self._drafter is None else self._drafter.propose()
        if drafts is None or self._core.num_in_flight > self._lookahead:
            return None
        return self._core.schedule(self._pace.prompts.most_prompt_tokens, drafts)

    def _take_result(self) -> None:
        done = self._in_flight.popleft()
        outputs = self._core.update(done.step.result)
        self._pace.stepped(done.plan, done.sent_s, self._now_s)
        if self._drafter is not None:
            duration_s = self._now_s - max(done.sent_s, self._last_done_s)
            period_s, num_tokens = self._now_s - self._last_done_s, len(outputs.token_ids)
            self._drafter.stepped(AnsweredStep(done.plan, duration_s, period_s, num_tokens))
        self._last_done_s = self._now_s
        for handle in outputs.handles.tolist():
            outcome = self._outcomes[handle]
            outcome.num_tokens += 1
            outcome.last_token_s = self._now_s
            if outcome.num_tokens == 1:
                outcome.first_token_s = self._now_s
        self._tell_ends(outputs.finished)

    def _tell_ends(self, ends: Sequence[Finished]) -> None:
        for finished in ends:
            outcome = self._outcomes[finished.request.handle]
            outcome.reason = finished.reason
            outcome.num_cached_tokens = finished.num_cached_tokens
            self._arrivals.ended(finished.request.handle, self._now_s)

    # --- the end ---------------------------------------------------------------------------------

    def _served(self) -> ServedWorkload:
        counters = self._core.counters
        return ServedWorkload(
            outcomes=self._outcomes,
            duration_s=max((o.last_token_s for o in self._outcomes), default=0.0),
            busy_s=self._busy_s,
            num_steps=counters.num_steps,
            num_preemptions=self._core.view.num_preemptions,
            num_prefill_tokens=counters.num_prefill_tokens,
            mean_batch=self._row_s / self._busy_s if self._busy_s else 0.0,
            peak_blocks=self._peak_blocks,
            max_waiting=self._max_waiting,
            drafts=None if self._drafter is None else self._draft_counts(),
        )

    def _draft_counts(self) -> DraftCounts:
        counters = self._core.counters
        return DraftCounts(
            num_verifications=counters.num_drafts,
            num_drafted_tokens=counters.num_drafted_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
        )
