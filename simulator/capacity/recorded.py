"""Reads a scheduler's recording as a workload: arrivals, output lengths and step times.

The recording is replayed on a core, which knows the tokens of each step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.core import Finished, Refused, Request, Scheduler, SchedulerConfig, StepPlan
from scheduler_svc.core.step.plan import StepOutputs
from scheduler_svc.journal.calls import perform
from scheduler_svc.journal.events import arguments_of, plans_of
from scheduler_svc.journal.recording import Recording
from simulator.capacity.step_times import MeasuredStep
from simulator.capacity.workload import Arrival

_PLANNING = ("schedule", "grant", "release")  # calls that plan steps


@dataclass(slots=True)
class RecordedWorkload:
    """The arrivals, steps and configuration in a recording."""

    config: SchedulerConfig
    arrivals: list[Arrival]
    steps: list[MeasuredStep]


@dataclass(slots=True)
class _Steps:
    """Plans in flight, and the duration of finished steps."""

    measured: list[MeasuredStep] = field(default_factory=list)
    _sent: dict[int, tuple[float, StepPlan]] = field(default_factory=dict)
    _last_done_s: float = 0.0

    def sent(self, plan: StepPlan, now_s: float) -> None:
        self._sent[plan.step_id] = now_s, plan

    def done(self, step_id: int, now_s: float) -> None:
        """Adds a finished step. It began when it was sent, or when the previous one was done."""
        sent_s, plan = self._sent.pop(step_id)
        duration_s = now_s - max(sent_s, self._last_done_s)
        self._last_done_s = now_s
        # The first step on a worker warms it up; one that only lets slots go computes nothing.
        if not plan.reset and plan.num_tokens:
            context = int(plan.num_computed.sum())
            self.measured.append(MeasuredStep(plan.num_tokens, context, duration_s))


def read_recorded(path: Path) -> RecordedWorkload:
    """Reads a recording from its first to its last event.

    Raises NotReplayable, Damaged or BadValues. Refused requests are left out, since those that were
    retried are recorded.
    """
    recording = Recording(path)
    core, steps = recording.restore(), _Steps()
    requests: dict[str, Request] = {s.request.request_id: s.request for s in core.live()}
    num_output: dict[str, int] = {}
    for stored in recording.events():
        event, arguments = stored.event, arguments_of(stored.event)
        try:
            answer = perform(core, event.call, arguments)
        except Refused:
            continue
        if event.call == "add":
            requests[arguments[0].request_id] = arguments[0]
        elif event.call == "update":
            steps.done(arguments[0].step_id, core.now_s)
        for plan in plans_of(answer) if event.call in _PLANNING else ():
            steps.sent(plan, core.now_s)
        for finished in _ends(answer):
            num_output[finished.request.request_id] = finished.num_output_tokens
    num_output.update(_unfinished(core))
    arrivals = [_arrival(request, num_output.get(i, 0)) for i, request in requests.items()]
    return RecordedWorkload(recording.config, _from_zero(arrivals), steps.measured)


def _ends(answer: Any) -> Iterator[Finished]:
    match answer:
        case Finished():
            yield answer
        case StepOutputs():
            yield from answer.finished
        case [Finished(), *_]:
            yield from answer


def _unfinished(core: Scheduler) -> Iterator[tuple[str, int]]:
    """Requests without a recorded end, with their output tokens by then."""
    for sequence in core.live():
        yield sequence.request.request_id, core.view.num_tokens(sequence) - sequence.num_prompt


def _arrival(request: Request, num_output: int) -> Arrival:
    deadline_s = request.deadline_s
    return Arrival(
        arrival_s=request.arrival_s,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=max(num_output, 1),
        tenant=request.tenant,
        priority=request.priority,
        timeout_s=None if deadline_s is None else deadline_s - request.arrival_s,
        prompt=request.prompt_token_ids,
    )


def _from_zero(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    first_s = arrivals[0].arrival_s if arrivals else 0.0
    return [arrival.at(arrival.arrival_s - first_s) for arrival in arrivals]
