"""Reads a scheduler's recording as a workload: arrivals, tokens and step times.

The recording is replayed on a core, which knows the tokens of each step.
"""

from dataclasses import dataclass, field
from pathlib import Path

from scheduler_svc.core import Refused, Scheduler, SchedulerConfig, Sequence, StepPlan
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.journal.calls import perform
from scheduler_svc.journal.events import arguments_of, plans_of
from scheduler_svc.journal.recording import Recording
from simulator.capacity.step_times import MeasuredStep, num_context_tokens
from simulator.capacity.workload import Arrival, Recorded

_PLANNING = ("schedule", "grant", "release")  # calls that plan steps


@dataclass(slots=True)
class RecordedWorkload:
    """The arrivals, steps and configuration in a recording."""

    config: SchedulerConfig
    arrivals: list[Arrival]  # with their tokens
    steps: list[MeasuredStep]
    has_text: bool  # its tokens are the users' own, not replacements that repeat nothing


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
            context = num_context_tokens(plan)
            self.measured.append(MeasuredStep(plan.num_tokens, context, duration_s))


def read_recorded(path: Path) -> RecordedWorkload:
    """Reads a recording from its first to its last event.

    Raises NotReplayable, Damaged or BadValues. Refused requests are left out, since those that were
    retried are recorded.
    """
    recording = Recording(path)
    core, steps = recording.restore(), _Steps()
    sequences: dict[str, Sequence] = {s.request.request_id: s for s in core.live()}
    for stored in recording.events():
        event, arguments = stored.event, arguments_of(stored.event)
        try:
            answer = perform(core, event.call, arguments)
        except Refused:
            continue
        if event.call == "add":
            sequences[arguments[0].request_id] = answer
        elif event.call == "update":
            steps.done(arguments[0].step_id, core.now_s)
        for plan in plans_of(answer) if event.call in _PLANNING else ():
            steps.sent(plan, core.now_s)
    return RecordedWorkload(
        config=recording.config,
        arrivals=_from_zero([_arrival(sequence, core) for sequence in sequences.values()]),
        steps=steps.measured,
        has_text=not recording.header.prompts_replaced,
    )


def _arrival(sequence: Sequence, core: Scheduler) -> Arrival:
    request, output = sequence.request, _tokens(sequence, core)[sequence.num_prompt :]
    deadline_s = request.deadline_s
    return Arrival(
        arrival_s=request.arrival_s,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=max(len(output), 1),
        tenant=request.tenant,
        priority=request.priority,
        timeout_s=None if deadline_s is None else deadline_s - request.arrival_s,
        recorded=Recorded(
            prompt=request.prompt_token_ids,
            output=output,
            cache_salt=request.cache_salt,
            skip_prefix_cache=request.skip_prefix_cache,
            takes_drafts=request.takes_drafts,
            session=request.session,
        ),
    )


def _tokens(sequence: Sequence, core: Scheduler) -> TokenIds:
    """All tokens of a sequence that has ended, or those that it has at the recording's end."""
    if sequence.slot is None:
        return sequence.token_ids
    return core.view.token_ids[sequence.slot, : core.view.num_tokens(sequence)].copy()


def _from_zero(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    first_s = arrivals[0].arrival_s if arrivals else 0.0
    return [arrival.at(arrival.arrival_s - first_s) for arrival in arrivals]
