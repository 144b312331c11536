"""The production core and a worker that only takes time, under a virtual clock.

Plans, admission, preemption, prefix hits and refusals are the core's own; a step takes the modelled
time. Nothing waits in real time, so hours pass in seconds, and the same workload always gives the
same numbers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import (
    Finished,
    FinishReason,
    RefusalKind,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.worker.pace import Pace
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


class VirtualServer:
    """One worker group's scheduler, from an empty queue to an empty queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        lookahead: int,
        wire_s: float = 0.0,
        target_itl_s: float | None = None,
    ) -> None:
        self._pace = Pace(target_itl_s)
        self._config = config
        self._step_time = step_time
        self._lookahead = lookahead
        self._wire_s = wire_s  # one way between scheduler and worker, in seconds
        self._core = Scheduler(config)
        self._prompts = Prompts(config.vocab_size)
        # (arrival time of the result, time of sending, plan)
        self._coming: deque[tuple[float, float, StepPlan]] = deque()
        self._outcomes: list[RequestOutcome] = []
        self._now_s = self._free_at_s = self._busy_s = self._row_s = self._peak_blocks = 0.0
        self._max_waiting = 0

    def serve(self, arrivals: Sequence[Arrival]) -> ServedWorkload:
        """Runs until every request has ended. Raises BadTrace for a request that can never run."""
        coming = deque(arrivals)
        while coming or self._core.num_waiting or self._core.num_running:
            self._now_s = self._next_event_s(coming)
            self._tell_ends(self._core.expire(self._now_s))
            while coming and coming[0].arrival_s <= self._now_s:
                self._submit(coming.popleft())
            has_come = bool(self._coming) and self._coming[0][0] <= self._now_s
            if has_come:
                self._take_result()
            # As in the scheduler's process, a request that arrives during a step waits for its end.
            if has_come or not self._coming:
                self._plan()
        return self._served()

    # --- events ----------------------------------------------------------------------------------

    def _next_event_s(self, coming: Sequence[Arrival]) -> float:
        times_s = [coming[0].arrival_s] if coming else []
        if self._coming:
            times_s.append(self._coming[0][0])
        if self._core.next_deadline_s is not None:
            times_s.append(self._core.next_deadline_s)
        if not times_s:
            raise AssertionError(f"{self._core.num_waiting} requests wait for nothing")
        return max(min(times_s), self._now_s)

    def _submit(self, arrival: Arrival) -> None:
        handle = len(self._outcomes)
        self._outcomes.append(RequestOutcome(arrival))
        timeout_s = arrival.timeout_s
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
        )
        try:
            self._core.add(request)
        except Refused as refused:
            if refused.kind is not RefusalKind.OVERLOADED:
                raise BadTrace(f"request {handle + 1}: {refused}") from refused
        self._max_waiting = max(self._max_waiting, self._core.num_waiting)

    def _plan(self) -> None:
        """Plans ahead of the results, up to the look-ahead."""
        while self._core.num_in_flight <= self._lookahead:
            plan = self._core.schedule(self._pace.prompts.most_prompt_tokens)
            if plan is None:
                return
            duration_s = self._step_time.of(plan.num_tokens, int(plan.num_computed.sum()))
            begin_s = max(self._now_s + self._wire_s, self._free_at_s)
            self._free_at_s = begin_s + duration_s
            self._coming.append((self._free_at_s + self._wire_s, self._now_s, plan))
            self._busy_s += duration_s
            self._row_s += duration_s * len(plan.slots)
            self._peak_blocks = max(self._peak_blocks, self._core.view.block_usage)

    def _take_result(self) -> None:
        _, sent_s, plan = self._coming.popleft()
        self._pace.stepped(plan, sent_s, self._now_s)
        token_ids = np.ones(len(plan.sampled_slots), dtype=np.int32)
        outputs = self._core.update(StepResult(plan.step_id, token_ids))
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
        )
