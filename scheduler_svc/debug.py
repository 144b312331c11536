"""DebugService of the scheduler: requests, blocks and steps as text. Prompts never appear."""

import time
from collections.abc import AsyncIterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any

import grpc

from pagewire.v1 import debug_pb2, debug_pb2_grpc, types_pb2
from scheduler_svc.core import Scheduler, Sequence
from scheduler_svc.core.history.recent import KEPT_REQUESTS
from scheduler_svc.engine import Engine
from scheduler_svc.explain.explain import explain, find_life, to_time_spent
from scheduler_svc.explain.story import describe, tell_before
from scheduler_svc.explain.trace import StepRecord
from scheduler_svc.group import WorkerGroup
from scheduler_svc.profile.record import Profiler
from scheduler_svc.sampling import Sampling
from wire.requests.profile import ProfileRefused
from wire.sampling import PENALTIES, changing

DEFAULT_REQUESTS = 100
DEFAULT_BLOCKS = 1000
DEFAULT_STEPS = 20

Context = grpc.aio.ServicerContext[Any, Any]


class DebugService(debug_pb2_grpc.DebugServiceServicer):
    """Reads the engine; changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profiler = Profiler(engine)

    async def ProfileSteps(
        self, request: debug_pb2.ProfileStepsRequest, context: Context
    ) -> AsyncIterator[debug_pb2.ProfileStepsResponse]:
        """The parts of the next steps' time, here and on the workers."""
        try:
            messages = await self._profiler.record(request)
        except ProfileRefused as refused:
            await context.abort(refused.code, str(refused))
        for message in messages:
            yield message

    async def ListRequests(
        self, request: debug_pb2.ListRequestsRequest, context: Context
    ) -> debug_pb2.ListRequestsResponse:
        """Live requests, oldest first."""
        live = [
            (group, group.core, sequence)
            for group in self._engine.groups
            if group.core is not None
            for sequence in group.core.live()
        ]
        live.sort(key=lambda found: found[2].request.arrival_s)
        shown, now_s = live[: request.limit or DEFAULT_REQUESTS], time.monotonic()
        return debug_pb2.ListRequestsResponse(
            requests=[_summary(group, core, sequence, now_s) for group, core, sequence in shown],
            total=len(live),
        )

    async def DescribeRequest(
        self, request: debug_pb2.DescribeRequestRequest, context: Context
    ) -> debug_pb2.DescribeRequestResponse:
        """One live request in full. Aborts with NOT_FOUND when no live request has the id."""
        found = self._engine.find(request.request_id)
        core = found[0].core if found else None
        if found is None or core is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"request_id {request.request_id!r} is not live"
            )
            raise AssertionError("abort raises")
        group, sequence = found
        now_s = time.monotonic()
        not_ready = "" if group.is_ready else group.reason
        elsewhere = {g.address: g.trace for g in self._engine.groups if g is not group}
        return debug_pb2.DescribeRequestResponse(
            request=_summary(group, core, sequence, now_s),
            block_ids=core.view.block_ids(sequence),
            sampling=_sampling(sequence),
            story=[
                *tell_before(sequence, elsewhere),
                *describe(core, sequence, group.trace, not_ready, now_s),
            ],
            time_spent=to_time_spent(sequence.timeline.spent_s(now_s)),
        )

    async def Explain(
        self, request: debug_pb2.ExplainRequest, context: Context
    ) -> debug_pb2.ExplainResponse:
        """Time that a live or recently ended request spent per phase and per reason to wait."""
        now_s, found = time.monotonic(), []
        for group in self._engine.groups:
            life = find_life(group.core, request.request_id, now_s) if group.core else None
            if group.core is not None and life is not None:
                found.append((life, group.core.config.max_num_seqs, group.trace))
        if found:  # in several groups only if an id was reused
            return explain(*max(found, key=lambda one: one[0].until_s))
        await context.abort(
            grpc.StatusCode.NOT_FOUND,
            f"request_id {request.request_id!r} is not live and not among the last "
            f"{KEPT_REQUESTS} that ended",
        )
        raise AssertionError("abort raises")

    async def DumpBlockPool(
        self, request: debug_pb2.DumpBlockPoolRequest, context: Context
    ) -> debug_pb2.DumpBlockPoolResponse:
        """Blocks of a group: those in use first, then cached ones."""
        group = await self._named_group(request.worker_address, context)
        core = group.core
        if core is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, group.reason)
            raise AssertionError("abort raises")
        view, limit = core.view, request.limit or DEFAULT_BLOCKS
        return debug_pb2.DumpBlockPoolResponse(
            num_blocks=view.num_blocks,
            num_free=view.num_free_blocks,
            num_cached=view.num_cached_blocks,
            block_size=view.block_size,
            blocks=[
                debug_pb2.BlockSummary(
                    block_id=block.block_id,
                    ref_count=block.ref_count,
                    hash="" if block.block_hash is None else f"{block.block_hash:016x}",
                    request_ids=block.request_ids,
                )
                for block in islice(view.blocks(), limit)
            ],
            free_queue=islice(view.free_blocks(), limit),
            worker_address=group.address,
            summary=(
                f"{view.num_blocks - view.num_free_blocks} of {view.num_blocks} blocks of "
                f"{view.block_size} tokens are in use ({view.block_usage:.1%}), "
                f"{view.num_cached_blocks} hold content a prefix can hit"
            ),
        )

    async def _named_group(self, address: str, context: Context) -> WorkerGroup:
        """The group with this address; without one, the only group."""
        groups = {group.address: group for group in self._engine.groups}
        if not address and len(groups) == 1:
            return self._engine.groups[0]
        if address not in groups:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"worker_address {address!r} is not one of {', '.join(groups)}",
            )
        return groups[address]

    async def ListSteps(
        self, request: debug_pb2.ListStepsRequest, context: Context
    ) -> debug_pb2.ListStepsResponse:
        """The last steps, newest first."""
        records = merge(
            *(
                [(r.sent_s, g.address, r) for r in g.trace.newest_first()]
                for g in self._engine.groups
            ),
            key=itemgetter(0),
            reverse=True,
        )
        newest = islice(records, request.limit or DEFAULT_STEPS)
        return debug_pb2.ListStepsResponse(
            steps=[_step(record, address) for _, address, record in newest]
        )


def _summary(
    group: WorkerGroup, core: Scheduler, sequence: Sequence, now_s: float
) -> debug_pb2.RequestSummary:
    slot, num_tokens = sequence.slot, core.view.num_tokens(sequence)
    num_computed = core.view.num_computed_tokens(sequence)
    num_blocks = core.view.num_blocks_of(sequence)
    age_s = sequence.timeline.age_s(now_s)
    where = "" if slot is None else f" in slot {slot}"
    return debug_pb2.RequestSummary(
        request_id=sequence.request.request_id,
        state=sequence.status.value,
        num_prompt_tokens=sequence.num_prompt,
        num_output_tokens=num_tokens - sequence.num_prompt,
        num_computed_tokens=num_computed,
        num_blocks=num_blocks,
        slot=slot,
        num_preemptions=sequence.num_preemptions,
        age_s=age_s,
        worker_address=group.address,
        summary=(
            f"{sequence.status.value}{where}: {sequence.num_prompt} prompt and "
            f"{num_tokens - sequence.num_prompt} output tokens, {num_computed} computed or "
            f"planned, {num_blocks} blocks, {age_s:.1f} s old"
        ),
    )


def _sampling(sequence: Sequence) -> str:
    sampling, request = sequence.request.sampling, sequence.request
    assert isinstance(sampling, Sampling)
    method = "greedy"
    if sampling.temperature:
        method = (
            f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, "
            f"top_k {sampling.top_k or 'off'}, min_p {sampling.min_p:g}, seed {sampling.seed}"
        )
    stops = ", ".join(map(str, sorted(sequence.stop_ids))) or "none"
    return (
        f"{method}{_processors(sampling)}; "
        f"ends at {sequence.max_len} tokens or at one of the tokens {stops}"
        f"{f', not before {request.min_tokens} output tokens' if request.min_tokens else ''}"
    )


def _processors(sampling: Sampling) -> str:
    """The other sampling parameters, each after a comma; token ids are only counted."""
    lists = (
        ("biased tokens", sampling.logit_bias),
        ("allowed tokens", sampling.allowed_token_ids),
        ("bad words", sampling.bad_words_token_ids),
        ("tokens with log probabilities", sampling.logprob_token_ids),
    )
    words = changing(sampling, *PENALTIES)
    words += [f"{len(entries)} {name}" for name, entries in lists if entries]
    if sampling.num_top_logprobs is not None:
        words.append(f"logprobs {sampling.num_top_logprobs}")
    if sampling.grammar:
        words.append(f"a grammar of {len(sampling.grammar)} characters")
    if sampling.num_prompt_logprobs is not None:
        words.append(f"prompt_logprobs {sampling.num_prompt_logprobs}")
    if sampling.pooling:
        words.append(f"pooling {types_pb2.Pooling.Name(sampling.pooling)[8:].lower()}")
    return "".join(f", {word}" for word in words)


def _step(record: StepRecord, address: str) -> debug_pb2.StepSummary:
    plan = record.plan
    chunks = [1] * len(plan.slots) if plan.num_scheduled is None else plan.num_scheduled.tolist()
    entered = {new.slot for new in plan.new_sequences}
    rows = [
        debug_pb2.StepRow(
            request_id=sequence.request.request_id,
            slot=slot,
            num_computed_tokens=computed,
            num_scheduled_tokens=chunk,
        )
        for sequence, slot, computed, chunk in zip(
            plan.sequences(), plan.slots.tolist(), plan.num_computed.tolist(), chunks, strict=True
        )
    ]
    num_prefills = sum(
        row.num_scheduled_tokens > 1
        or row.slot in entered
        or row.num_computed_tokens < sequence.num_prompt
        for row, sequence in zip(rows, plan.sequences(), strict=True)
    )
    duration = "running" if record.duration_s is None else f"{record.duration_s * 1e3:.2f} ms"
    return debug_pb2.StepSummary(
        step_id=plan.step_id,
        num_prefill_rows=num_prefills,
        num_decode_rows=len(rows) - num_prefills,
        num_tokens=plan.num_tokens,
        rows=rows,
        preempted=plan.preempted,
        num_free_blocks=plan.num_free_blocks,
        duration_us=int((record.duration_s or 0) * 1e6),
        worker_address=address,
        summary=(
            f"step {plan.step_id}: {num_prefills} prefill and {len(rows) - num_prefills} decode "
            f"rows, {plan.num_tokens} tokens, {duration}"
        ),
    )
