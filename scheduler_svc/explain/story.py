"""Describes a request's past and why it waited, from the steps that are kept."""

from collections.abc import Iterator, Mapping

from scheduler_svc.core import (
    AdmissionHold,
    Cause,
    EnteringSequence,
    Scheduler,
    Sequence,
    Status,
    StepPlan,
)
from scheduler_svc.explain.trace import Trace

_WAITS = {
    Cause.BUDGET: "the step's token budget (max_num_batched_tokens) was used up",
    Cause.FORK_GROUP: "the first in the queue awaited its prompt from its fork group",
    Cause.TOKEN: "the first in the queue awaited a token in flight",
    Cause.PREPARATION: "the worker prepared what all that waited require, such as grammars",
    Cause.KV: "blocks of what all that waited had computed before came from host memory or disk",
    Cause.DRAIN: "the worker group was drained and took nothing new",
    Cause.PREEMPTION: "a running request was preempted, and must not be overtaken",
}


def tell(core: Scheduler, sequence: Sequence, trace: Trace, now_s: float) -> list[str]:
    """One line per change, oldest first; consecutive steps with the same line are joined."""
    lines: list[str] = []
    first_step, last_step, before = 0, 0, ""
    for step_id, line in _step_by_step(core, sequence, trace):
        if line != before and before:
            lines.append(_spanned(first_step, last_step, before))
        if line != before:
            first_step, before = step_id, line
        last_step = step_id
    if before:
        lines.append(_spanned(first_step, last_step, before))
    age_s = sequence.timeline.age_s(now_s)
    lines.append(f"{age_s:.3f} s old: {sequence.timeline.tell(now_s)}")
    return lines


def tell_before(sequence: Sequence, elsewhere: Mapping[str, Trace]) -> list[str]:
    """One line per worker group that the request ran on before it migrated, oldest first."""
    request_id, arrival_s = sequence.request.request_id, sequence.request.arrival_s
    entries = [
        (record.sent_s, f"step {record.plan.step_id} of worker {address}: {_entered(new)}")
        for address, trace in elsewhere.items()
        for record in trace.newest_first()
        if record.sent_s >= arrival_s
        for new in record.plan.new_sequences
        if new.request.request_id == request_id
    ]
    return [f"{line}; moved when that worker was lost" for _, line in sorted(entries)]


def _entered(new: EnteringSequence) -> str:
    return (
        f"entered slot {new.slot} with {len(new.token_ids)} tokens, "
        f"{new.num_computed_tokens} of them cached"
    )


def _spanned(first_step: int, last_step: int, line: str) -> str:
    steps = f"step {first_step}" if first_step == last_step else f"steps {first_step}-{last_step}"
    return f"{steps}: {line}"


def _step_by_step(core: Scheduler, sequence: Sequence, trace: Trace) -> Iterator[tuple[int, str]]:
    request, waits = sequence.request, True
    for record in reversed(list(trace.newest_first())):
        plan = record.plan
        if record.sent_s < request.arrival_s:
            continue
        if request.request_id in plan.preempted:
            waits = True
            yield plan.step_id, "preempted to make room"
        request_id = request.request_id  # the object is replaced by a new priority
        entry = next((n for n in plan.new_sequences if n.request.request_id == request_id), None)
        if entry is not None:
            waits = False
            yield plan.step_id, _entered(entry)
        elif waits and plan.hold is not None and not _runs(plan, sequence):
            yield plan.step_id, f"waited: {_why(core, plan.hold, request.request_id)}"


def _runs(plan: StepPlan, sequence: Sequence) -> bool:
    return sequence in plan.running.sequences


def _why(core: Scheduler, hold: AdmissionHold, request_id: str) -> str:
    if hold.cause is Cause.SLOTS:
        return f"all {core.config.max_num_seqs} slots (max_num_seqs) were taken"
    if hold.cause is not Cause.BLOCKS:
        return _WAITS[hold.cause]
    if request_id in hold.blocks_short:
        return f"{_count(hold.blocks_short[request_id], 'block')} short"
    short = hold.blocks_short.get(hold.first, 0)
    return f"after {hold.first!r}, which was {_count(short, 'block')} short"


def waits_for(core: Scheduler, sequence: Sequence, not_ready: str) -> str:
    """The condition for a waiting request to run; `not_ready` is why no worker serves, if so."""
    if not_ready:
        return f"no worker is ready ({not_ready})"
    if sequence.status is Status.PREPARING:
        kinds = dict.fromkeys(one.kind.value for one in sequence.request.requirements)
        return f"until the worker has prepared its {' and '.join(kinds)}"
    if sequence.status is Status.WAITING_FOR_KV:
        return "until blocks of its prompt have come from the worker's host memory or disk"
    num_ahead = 0
    for other in core.view.waiting:
        if other is sequence:
            break
        num_ahead += 1
    if num_ahead:
        return f"after {_count(num_ahead, 'request')}"
    if not core.view.num_free_slots:
        return f"first in the queue; all {core.config.max_num_seqs} slots (max_num_seqs) are taken"
    return f"first in the queue; {_count(core.view.num_free_blocks, 'block')} free"


def describe(
    core: Scheduler, sequence: Sequence, trace: Trace, not_ready: str, now_s: float
) -> list[str]:
    """The request's past, oldest line first, and what it waits for now."""
    lines = tell(core, sequence, trace, now_s)
    if sequence.status is not Status.RUNNING:
        lines.append(f"now {sequence.status.value}: {waits_for(core, sequence, not_ready)}")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
