"""The path of first tokens through scheduler and worker: where each part of the time went."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.v1 import debug_pb2, timing_pb2
from scheduler_svc.core import Phase, StepPlan, Timeline
from scheduler_svc.core.history.recent import KEPT_REQUESTS

SCHEDULER, WORKER = "scheduler", "worker"
_NAMES = {Phase.PREFILL: "earlier steps of the prompt", Phase.WORKER_AWAY: "worker away"}
_PLAN = "plan and encode"


@dataclass(frozen=True, slots=True)
class FirstTokenStep:
    """The step that made a first token, in seconds of the monotonic clock."""

    sent_s: float
    received_s: float
    applied_s: float
    timings: timing_pb2.StepTimings  # of the worker
    admitted: frozenset[str]  # ids of the requests that this step admitted, or admitted again

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        sent_s: float,
        received_s: float,
        applied_s: float,
        timings: timing_pb2.StepTimings,
    ) -> "FirstTokenStep":
        """The record of a step that was sent, answered and applied at these times."""
        admitted = frozenset(new.request.request_id for new in plan.new_sequences)
        return cls(sent_s, received_s, applied_s, timings, admitted)


class FirstTokens:
    """The steps that made the first tokens of the last requests, by id."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, FirstTokenStep] = OrderedDict()

    def note(self, request_ids: Iterable[str], step: FirstTokenStep) -> None:
        """Adds a step for the requests whose first token it made."""
        for request_id in request_ids:
            self._by_id[request_id] = step
            self._by_id.move_to_end(request_id)
            if len(self._by_id) > KEPT_REQUESTS:
                self._by_id.popitem(last=False)

    def path(
        self, request_id: str, timeline: Timeline, arrival_s: float
    ) -> list[debug_pb2.PathStage]:
        """From arrival to delivery, in order; the parts add up. Empty if it is not known."""
        step = self._by_id.get(request_id)
        if step is None or step.sent_s < arrival_s:  # of an earlier request with this id
            return []
        return [
            *_before(step, timeline, arrival_s, request_id in step.admitted),
            *_in_step(step),
            _stage(SCHEDULER, "apply", step.applied_s - step.received_s),
        ]


def _before(
    step: FirstTokenStep, timeline: Timeline, arrival_s: float, is_admitted: bool
) -> Iterable[debug_pb2.PathStage]:
    """The stays in phases until the step was sent, without gaps."""
    at_s = arrival_s
    for stay in timeline.spans(step.sent_s):
        end_s = min(stay.end_s, step.sent_s)
        if end_s > at_s:
            name = _NAMES.get(stay.phase, stay.phase.value)
            # A prompt is prefilling from the moment at which its first step is planned.
            is_last = end_s == step.sent_s
            yield _stage(SCHEDULER, _PLAN if is_last and is_admitted else name, end_s - at_s)
            at_s = end_s
    if step.sent_s > at_s:
        yield _stage(SCHEDULER, _PLAN, step.sent_s - at_s)


def _in_step(step: FirstTokenStep) -> Iterable[debug_pb2.PathStage]:
    """The worker's times of the step; the rest is the way to it and back."""
    timings = step.timings
    parts = {
        "wait for earlier steps": timings.queue_us,
        "inputs": timings.prepare_us,
        "model": timings.forward_us,
        "sample": timings.sample_us,
        "copy": timings.copy_us,
    }
    wall_us = max((step.received_s - step.sent_s) * 1e6, 0.0)
    # A device computes on while the next step's inputs are built: what overlaps counts once.
    too_long_us = max(sum(parts.values()) - wall_us, 0.0)
    rest_us = max(wall_us - sum(parts.values()), 0.0)
    yield _stage(SCHEDULER, "to the worker and back", rest_us / 1e6)
    for name, took_us in parts.items():
        cut_us = min(too_long_us, took_us)
        too_long_us -= cut_us
        if took_us > cut_us:
            yield _stage(WORKER, name, (took_us - cut_us) / 1e6)


def _stage(service: str, name: str, seconds: float) -> debug_pb2.PathStage:
    return debug_pb2.PathStage(service=service, name=name, seconds=seconds)
