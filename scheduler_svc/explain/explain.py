"""Explains a live or ended request: time per phase, and per reason to wait.

The phases come from the request's timeline. Waiting time is split at the times at which steps were
planned; each step records why waiting requests were not admitted.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pagewire.v1 import debug_pb2
from scheduler_svc.core import AdmissionHold, Cause, Phase, Scheduler, Timeline
from scheduler_svc.explain.trace import StepRecord, Trace

_WAITING = (Phase.QUEUE, Phase.PREPARING, Phase.PREEMPTED)
_ROUNDING_S = 1e-6
_FOR_A_STEP = "for the steps in flight, after which the next is planned"
_FORGOTTEN = "in steps that are no longer recorded"
_REASONS = {
    Cause.BUDGET: "for room in a step (max_num_batched_tokens)",
    Cause.PREPARATION: "for what the worker prepares for it, such as a grammar",
    Cause.TOKEN: "for a token in flight to the first request in the queue",
    Cause.DRAIN: "for another worker group: this one is drained",
    Cause.PREEMPTION: "after a request that was preempted for lack of KV blocks",
}


@dataclass(frozen=True, slots=True)
class Life:
    """The facts to explain about a live request or one that has ended."""

    request_id: str
    state: str
    message: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_found_waiting: int
    num_output_tokens: int
    num_preemptions: int
    has_entered: bool  # a slot
    arrival_s: float
    until_s: float
    timeline: Timeline


def find_life(core: Scheduler, request_id: str, now_s: float) -> Life | None:
    """The facts about a request; None when it is unknown or ended too long ago."""
    sequence, past = core.find(request_id), core.recent.find(request_id)
    if sequence is not None:
        return Life(
            request_id=request_id,
            state=sequence.status.value,
            message="",
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached or 0,
            num_found_waiting=sequence.num_found_waiting,
            num_output_tokens=core.view.num_tokens(sequence) - sequence.num_prompt,
            num_preemptions=sequence.num_preemptions,
            has_entered=sequence.has_run,
            arrival_s=sequence.request.arrival_s,
            until_s=now_s,
            timeline=sequence.timeline,
        )
    if past is None:
        return None
    return Life(
        request_id=request_id,
        state=past.reason.value,
        message=past.message,
        num_prompt_tokens=past.num_prompt_tokens,
        num_cached_tokens=past.num_cached_tokens,
        num_found_waiting=past.num_found_waiting,
        num_output_tokens=past.num_output_tokens,
        num_preemptions=past.num_preemptions,
        has_entered=past.has_entered,
        arrival_s=past.arrival_s,
        until_s=past.ended_s,
        timeline=past.timeline,
    )


def explain(life: Life, max_num_seqs: int, trace: Trace) -> debug_pb2.ExplainResponse:
    """The answer; `trace` is of the request's last worker group."""
    waits = _waits(life, max_num_seqs, trace)
    spent_s = life.timeline.spent_s(life.until_s)
    wall_s = life.timeline.age_s(life.until_s)
    longest = f"; waited longest {waits[0].reason}" if waits else ""
    return debug_pb2.ExplainResponse(
        request_id=life.request_id,
        state=life.state,
        message=life.message,
        wall_s=wall_s,
        time_spent=to_time_spent(spent_s),
        waits=waits,
        num_prompt_tokens=life.num_prompt_tokens,
        num_cached_tokens=life.num_cached_tokens,
        num_output_tokens=life.num_output_tokens,
        num_preemptions=life.num_preemptions,
        story=_story(life),
        first_token=trace.first_tokens.path(life.request_id, life.timeline, life.arrival_s),
        summary=f"{life.state} after {wall_s:.3f} s: {life.timeline.tell(life.until_s)}{longest}"
        f"{_lost(life)}",
    )


def _lost(life: Life) -> str:
    """The loss of a turn between its arrival and its entry, in words; empty if none is known."""
    num_lost = life.num_found_waiting - life.num_cached_tokens
    if num_lost <= 0 or not life.has_entered:
        return ""
    return (
        f"; computed {num_lost} prompt tokens anew: they were in the prefix cache while it waited, "
        "and others, whose turn came first, took their blocks"
    )


def to_time_spent(spent_s: dict[Phase, float]) -> debug_pb2.TimeSpent:
    """Seconds by phase; they add up to the request's age."""
    return debug_pb2.TimeSpent(
        queue_s=spent_s[Phase.QUEUE],
        prefill_s=spent_s[Phase.PREFILL],
        decode_s=spent_s[Phase.DECODE],
        preempted_s=spent_s[Phase.PREEMPTED],
        worker_away_s=spent_s[Phase.WORKER_AWAY],
        grammar_s=spent_s[Phase.PREPARING],
        kv_s=spent_s[Phase.KV],
    )


def _story(life: Life) -> list[str]:
    """One line per phase: when it began and how long it took, in seconds."""
    return [
        f"{span.begin_s - life.arrival_s:9.3f} s  {span.phase.value:<12}"
        f"{span.end_s - span.begin_s:9.3f} s"
        for span in life.timeline.spans(life.until_s)
    ]


def _waits(life: Life, max_num_seqs: int, trace: Trace) -> list[debug_pb2.WaitingTime]:
    """Seconds by reason, the longest first; they add up to the time spent waiting."""
    records = list(reversed(list(trace.newest_first())))
    sent_s = [record.sent_s for record in records]
    waits: dict[str, float] = defaultdict(float)
    for begin_s, end_s in _waiting_spans(life):
        first, last = bisect_right(sent_s, begin_s), bisect_right(sent_s, end_s)
        moments = [begin_s, *sent_s[first:last], end_s]
        for since_s, until_s in pairwise(moments):
            number = bisect_right(sent_s, since_s) - 1
            record = records[number] if number >= 0 else None
            reason = _reason(record, life.request_id, max_num_seqs, trace.has_forgotten)
            waits[reason] += until_s - since_s
    # A timeline with very many phases keeps only the last ones.
    spent_s = life.timeline.spent_s(life.until_s)
    rest_s = sum(spent_s[phase] for phase in _WAITING) - sum(waits.values())
    if rest_s > _ROUNDING_S:
        waits[_FORGOTTEN] += rest_s
    by_length = sorted(waits.items(), key=lambda wait: -wait[1])
    return [debug_pb2.WaitingTime(reason=r, seconds=s) for r, s in by_length if s > 0]


def _waiting_spans(life: Life) -> Iterator[tuple[float, float]]:
    for span in life.timeline.spans(life.until_s):
        if span.phase in _WAITING:
            yield span.begin_s, span.end_s


def _reason(
    record: StepRecord | None, request_id: str, max_num_seqs: int, has_forgotten: bool
) -> str:
    """Why a request waited after this step was planned; None means before the first record kept."""
    if record is None:
        return _FORGOTTEN if has_forgotten else _FOR_A_STEP
    hold: AdmissionHold | None = record.plan.hold
    if hold is None or request_id in record.plan.preempted:
        return _FOR_A_STEP if hold is None else "for KV blocks"
    if hold.cause is Cause.SLOTS:
        return f"for one of the {max_num_seqs} slots (max_num_seqs)"
    if hold.cause is not Cause.BLOCKS:
        return _REASONS[hold.cause]
    return "for KV blocks" if request_id in hold.blocks_short else "after others that lack blocks"
