"""Converts between calls of the core and recorded events, and defines what a replay compares.

An event holds the call, its arguments and its answer; a plan is stored as the step message.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagewire.v1.journal_pb2 import JournalEvent, JournalPlanFacts
from scheduler_svc.convert import to_step
from scheduler_svc.core import (
    Cut,
    Finished,
    RefusalKind,
    Refused,
    Request,
    Sequence,
    StepOutputs,
    StepPlan,
    TransferOrders,
)
from scheduler_svc.core.history.migration import MovedSequence
from scheduler_svc.core.kv.pulls import PullOrders
from scheduler_svc.journal import values
from scheduler_svc.journal.calls import SET_STOP_IDS
from scheduler_svc.journal.mask import Mask
from wire.columns import pack


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the core with its result."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any = None
    refused: Refused | None = None


def to_event(number: int, call: Call) -> JournalEvent:
    """The call as an event to be written."""
    event = JournalEvent(number=number, call=call.name, raised=_raised(call.refused))
    if call.arguments:
        event.arguments.CopyFrom(values.encode(list(call.arguments)))
    if plans := plans_of(call.answer):
        plan = plans[0]
        granted_steps = len(plans) if plan.grant_id is not None else 0
        event.step.CopyFrom(to_step(plan, granted_steps))
        event.plan.CopyFrom(
            JournalPlanFacts(
                sampled_slots=pack(plan.sampled_slots),
                preempted=plan.preempted,
                num_free_blocks=plan.num_free_blocks,
            )
        )
    elif (outcome := _outcome(call.answer)) is not None:
        event.outcome.json = json.dumps(outcome)
    return event


def plans_of(answer: Any) -> tuple[StepPlan, ...]:
    """The steps that a call planned, for one frame."""
    if isinstance(answer, StepPlan):
        return (answer,)
    if isinstance(answer, tuple):
        return answer
    return ()


def arguments_of(event: JournalEvent) -> tuple[Any, ...]:
    """The arguments of an event's call. Raises BadValues."""
    return tuple(values.decode(event.arguments)) if event.HasField("arguments") else ()


def outcome_of(event: JournalEvent) -> Any:
    """The recorded answer except plans, as `_outcome` made it; None when there was none."""
    return json.loads(event.outcome.json) if event.HasField("outcome") else None


def _outcome(answer: Any) -> Any:
    """The part of an answer that a replay must repeat, as plain values."""
    match answer:
        case StepOutputs():
            return {"num_tokens": len(answer.token_ids), "ended": _ends(answer.finished)}
        case Cut():
            return {"cut": [answer.first_step_id, answer.last_step_id]}
        case [Sequence() | MovedSequence(), *_]:
            return {"count": len(answer)}
        case int():
            return {"count": answer}
        case Finished():
            return {"ended": _ends([answer])}
        case [Finished(), *_]:
            return {"ended": _ends(answer)}
        case PullOrders():
            pulls = [[one.transfer_id, one.block_ids, one.source_block_ids] for one in answer.pulls]
            return {"pulls": pulls, "cancelled": list(answer.cancelled_ids)}
        case TransferOrders():
            return _transfers(answer)
    return None


def _transfers(orders: TransferOrders) -> dict[str, list[Any]]:
    """The blocks by transfer; keys are of tokens, which a recording may replace."""
    named = ("fetches", orders.fetches), ("stores", orders.stores)
    found: dict[str, list[Any]] = {
        name: [[one.transfer_id, one.block_ids, one.tier_blocks] for one in transfers]
        for name, transfers in named
    }
    return found | {"cancelled": list(orders.cancelled_ids)}


def _ends(finished: list[Finished]) -> list[list[object]]:
    return [[f.request.request_id, f.reason.value, f.num_output_tokens] for f in finished]


def ended(answer: Any) -> list[str]:
    """Ids of the requests that a call ended."""
    outcome = _outcome(answer) or {}
    return [str(request_id) for request_id, _, _ in outcome.get("ended", ())]


def _raised(refused: Refused | None) -> str:
    return "" if refused is None else f"{refused.kind.value}: {refused}"


def masked(call: Call, mask: Mask) -> Iterator[Call]:
    """The call with replaced tokens; a second call may precede it."""
    match call:
        case Call("add", (Request() as request,), refused=Refused() as refused) if (
            refused.kind is not RefusalKind.OVERLOADED
        ):
            # Its tokens may be the reason of the refusal; the call only advanced the time.
            yield Call("now_s", (request.arrival_s,))
        case Call("add" | "reserve", (Request() as request, *more)):
            yield Call(call.name, (mask.request(request), *more), None, call.refused)
        case Call("migrate_in", (Sequence() as sequence, *more)):
            yield Call("migrate_in", (mask.sequence(sequence), *more))
        case Call("end_session", (session_id, cache_salt)):
            yield Call("end_session", (mask.name(session_id), mask.name(cache_salt)))
        case Call("schedule", (limit, drafts), answer):
            drafts = mask.drafts(drafts)
            planned = answer if answer is None else mask.plan(answer)
            yield Call("schedule", (limit, drafts), planned)
        case Call(answer=StepPlan() | (StepPlan(), *_)):
            plans = tuple(mask.plan(plan) for plan in plans_of(call.answer))
            answer = plans[0] if isinstance(call.answer, StepPlan) else plans
            yield Call(call.name, call.arguments, answer)
        case Call("update", (result,), StepOutputs() as outputs):
            result, stops = mask.result(result, outputs)
            for request_id, stop in stops.items():
                yield Call(SET_STOP_IDS, (request_id, *stop))
            yield Call("update", (result,), outputs)
        case _:
            if call.name == "worker_lost":
                mask.forget_steps()
            if call.name == "skip":
                mask.forget_steps(*call.arguments)
            for request_id in ended(call.answer):
                mask.forget(request_id)
            yield call
