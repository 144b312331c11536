"""Converts between the core's plain values and protobuf messages."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.core import (
    GRAMMAR,
    BlockMoves,
    BlockTransfer,
    EnteringSequence,
    Finished,
    FinishReason,
    Preparations,
    PullOrders,
    ReceivedPromptOutput,
    Request,
    RequirementKind,
    SessionHint,
    StepPlan,
    StepResult,
    TransferOrders,
)
from scheduler_svc.core.kv.tier import TierName
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.requirement import Requirements, adapter_requirement
from scheduler_svc.core.step.plan import WorkerDraft
from scheduler_svc.pictures import read_pictures, to_picture_preparation, to_placed_pictures
from scheduler_svc.sampling import BadSampling, Sampling, resolve
from wire.adapters import MAX_PATH_BYTES, AdapterSource
from wire.columns import INT32, UINT8, UINT32, UINT64, pack, unpack
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptOutput
from wire.state_hash import StateHashes
from wire.tracing.context import TraceContext
from wire.versions import DISK_TIER, HOST_TIER

FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
    FinishReason.EXPIRED: types_pb2.FINISH_REASON_ERROR,
    FinishReason.DEAD_END: types_pb2.FINISH_REASON_ERROR,
    FinishReason.POISON: types_pb2.FINISH_REASON_ERROR,
}


_TIERS = {TierName.HOST: HOST_TIER, TierName.DISK: DISK_TIER}
NO_TRACES: Mapping[str, TraceContext] = {}

# A new request, submitted over a session or as a Generate call.
ClientRequest = scheduler_pb2.Submit | scheduler_pb2.SchedulerServiceGenerateRequest


@dataclass(frozen=True, slots=True)
class Origin:
    """The request's client, handle, id, tenant and timeout."""

    request_id: str
    client: int
    handle: int
    timeout_s: float | None  # from its arrival
    trace: TraceContext | None = None  # of its caller


def to_request(
    submitted: ClientRequest,
    token_ids: NDArray[np.int32],
    origin: Origin,
    *,
    drawn_seed: int,
    vocab_size: int,
    arrival_s: float,
) -> Request:
    """Returns a request for the core. Raises BadSampling or BadPicture, naming what is at fault."""
    prompt, output = _split(submitted, token_ids)
    params, timeout_s = submitted.sampling, origin.timeout_s
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    sampling = resolve(params, drawn_seed, vocab_size)
    if submitted.pooling:
        _check_pooling(submitted)
        max_tokens = 0
    adapter = _adapter_of(submitted)
    sampling = replace(sampling, adapter=adapter, pooling=submitted.pooling)
    output_range, pictures = _prompt_output_range(sampling, len(prompt)), read_pictures(submitted)
    return Request(
        request_id=origin.request_id,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        sampling=sampling,
        client=origin.client,
        handle=origin.handle,
        arrival_s=arrival_s,
        deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        priority=submitted.priority,
        tenant=submitted.tenant,
        cache_salt=submitted.cache_salt,
        skip_prefix_cache=submitted.skip_prefix_cache,
        skip_speculation=params.skip_speculation,
        fork_group=submitted.fork_group,
        prompt_output_begin=output_range.start,
        prompt_output_end=output_range.stop,
        output_token_ids=output,
        resumed_by_client=isinstance(submitted, scheduler_pb2.Submit)
        and submitted.resumed_by_client,
        adapter_id="" if adapter is None else adapter.adapter_id,
        extras=pictures.extras,
        requirements=_requirements(sampling) + pictures.requirements,
        pictures=pictures.payload,
        num_deaths=submitted.num_deaths,
        session=_to_hint(submitted.session) if submitted.HasField("session") else None,
    )


def _adapter_of(submitted: ClientRequest) -> AdapterSource | None:
    """The adapter that computes a request; None: the model alone. Raises BadSampling."""
    if not submitted.HasField("adapter"):
        return None
    adapter = AdapterSource.from_message(submitted.adapter)
    if not adapter.adapter_id or len(adapter.path.encode()) > MAX_PATH_BYTES:
        raise BadSampling("adapter: has no adapter_id, or too long a path")
    return adapter


def _requirements(sampling: Sampling) -> Requirements:
    found: Requirements = (GRAMMAR,) if sampling.grammar else ()
    if sampling.adapter is None:
        return found
    return (*found, adapter_requirement(sampling.adapter.adapter_id))


def _to_hint(told: types_pb2.SessionHint) -> SessionHint:
    ttl_s = told.ttl_s if told.HasField("ttl_s") else None
    return SessionHint(told.session_id, told.parent_session_id, ttl_s, told.prefix_key)


def _split(
    submitted: ClientRequest, token_ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
    """Splits tokens into (prompt, output so far); the output is None for a new request."""
    if not submitted.HasField("num_prompt_tokens"):
        return token_ids, None
    num_prompt = submitted.num_prompt_tokens
    if not 0 < num_prompt <= len(token_ids):
        raise BadSampling(f"num_prompt_tokens is {num_prompt}, of {len(token_ids)} tokens")
    return token_ids[:num_prompt], token_ids[num_prompt:]


def _check_pooling(submitted: ClientRequest) -> None:
    params = submitted.sampling
    if submitted.pooling not in (types_pb2.POOLING_LAST, types_pb2.POOLING_MEAN):
        raise BadSampling(f"pooling is {submitted.pooling}, which is unknown")
    if params.max_tokens:
        raise BadSampling(f"max_tokens is {params.max_tokens}, with pooling nothing is sampled")
    if params.HasField("prompt_logprobs"):
        raise BadSampling("prompt_logprobs cannot be had together with pooling")


def _prompt_output_range(sampling: Sampling, num_prompt: int) -> range:
    """The range of prompt positions with outputs due: log probabilities or hidden states."""
    if sampling.pooling == types_pb2.POOLING_LAST:
        return range(max(num_prompt - 1, 0), num_prompt)
    if sampling.pooling == types_pb2.POOLING_MEAN:
        return range(num_prompt)
    # A position's output is the log probability of the next token; the last one's is sampled.
    return range(0 if sampling.num_prompt_logprobs is None else max(num_prompt - 1, 0))


def to_step(
    plan: StepPlan,
    granted_steps: int = 0,
    wants_state: bool = False,
    traces: Mapping[str, TraceContext] = NO_TRACES,
) -> worker_pb2.SchedulerOutput:
    """A plan as the worker's message; with `granted_steps`, the first plan of such a grant.

    `traces` are those of requests that are traced, by id.
    """
    step = worker_pb2.SchedulerOutput(
        step_id=plan.step_id,
        ack_step_id=plan.ack_step_id,
        reset=plan.reset,
        same_rows=plan.same_rows,
        granted_steps=granted_steps,
        wants_state=wants_state,
    )
    if not plan.same_rows:
        step.slots = plan.slots.tobytes()
    if plan.num_scheduled is not None:
        step.num_scheduled = plan.num_scheduled.tobytes()
    if plan.freed_slots:
        step.freed_slots = pack(plan.freed_slots)
    if plan.appended_slots:
        step.appended_slots = pack(plan.appended_slots)
        step.appended_block_ids = pack(plan.appended_block_ids)
    for appended in plan.appended_to_groups:
        step.appended_to_groups.add(
            group=appended.group, slots=pack(appended.slots), block_ids=pack(appended.block_ids)
        )
    if plan.state_saves:
        step.state_save_slots = pack([save.slot for save in plan.state_saves])
        step.state_save_positions = pack([save.position for save in plan.state_saves])
        step.state_save_snapshots = pack([save.snapshot for save in plan.state_saves])
    if plan.moves is not None:
        _add_moves(step, plan.moves)
    if plan.drafts:
        _add_drafts(step, plan)
    for new in plan.new_sequences:
        with blaming(new.request.request_id):
            step.new_sequences.append(_to_new_sequence(new))
        if (trace := traces.get(new.request.request_id)) is not None:
            message = step.new_sequences[-1].trace
            message.traceparent, message.tracestate = trace.traceparent, trace.tracestate
    return step


def _add_moves(step: worker_pb2.SchedulerOutput, moves: BlockMoves) -> None:
    step.swapped_out_block_ids = pack(moves.swapped_out)
    step.to_host_block_ids = pack(moves.to_host)
    step.from_host_block_ids = pack(moves.from_host)
    step.swapped_in_block_ids = pack(moves.swapped_in)
    step.copied_from_block_ids = pack(moves.copied_from)
    step.copied_to_block_ids = pack(moves.copied_to)


def _add_drafts(step: worker_pb2.SchedulerOutput, plan: StepPlan) -> None:
    drafts = [plan.drafts.get(slot, ()) for slot in plan.slots.tolist()]
    step.num_drafted = pack(list(map(len, drafts)))
    known = [row for row in drafts if not isinstance(row, WorkerDraft)]  # all rows', or no row's
    step.draft_token_ids = pack([int(token_id) for row in known for token_id in row])


def _to_new_sequence(new: EnteringSequence) -> worker_pb2.NewSequence:
    sampling = new.request.sampling
    assert isinstance(sampling, Sampling)
    return worker_pb2.NewSequence(
        slot=new.slot,
        request_id=new.request.request_id,
        token_ids=new.token_ids.tobytes(),
        num_prompt_tokens=len(new.request.prompt_token_ids),
        num_computed_tokens=new.num_computed_tokens,
        block_ids=pack(new.block_ids),
        group_block_ids=[pack(block_ids) for block_ids in new.group_block_ids],
        state_snapshot=new.state_snapshot or 0,
        sampling=worker_pb2.RowSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=new.request.min_tokens,
            stop_token_ids=new.stop_ids if new.request.min_tokens else (),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=[
                types_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in sampling.logit_bias
            ],
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words_token_ids=[
                types_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words_token_ids
            ],
            logprobs=sampling.num_top_logprobs,
            logprob_token_ids=sampling.logprob_token_ids,
            grammar=sampling.grammar,
            prompt_logprobs=sampling.num_prompt_logprobs,
            pooling=sampling.pooling,
        ),
        prompt_output_begin=new.prompt_output_begin,
        prompt_only=new.request.is_prompt_only,
        grammar_preparation=new.preparations.get(GRAMMAR, 0),
        adapter_preparation=_adapter_preparation(new),
        pictures=to_placed_pictures(new),
    )


def _adapter_preparation(new: EnteringSequence) -> int:
    if not new.request.adapter_id:
        return 0
    return new.preparations.get(adapter_requirement(new.request.adapter_id), 0)


def to_preparations(
    preparations: Preparations, kinds: Container[RequirementKind]
) -> list[worker_pb2.AttachRequest]:
    """Orders about requirements, as the frames of a worker.

    `kinds` are those that it prepares. Ids are of one count for all kinds, and one that a worker
    does not know is dropped already, so each kind hears of all that is dropped. Each picture has a
    frame of its own, since it may be as large as a frame can be.
    """
    grammars = worker_pb2.PrepareGrammars(dropped_ids=preparations.dropped_ids)
    adapters, pictures = worker_pb2.PrepareAdapters(), []
    if RequirementKind.ADAPTER in kinds:
        adapters.dropped_ids.extend(preparations.dropped_ids)
    for wanted in preparations.wanted:
        sampling, number = wanted.request.sampling, wanted.preparation_id
        assert isinstance(sampling, Sampling)
        if wanted.requirement.kind is RequirementKind.ADAPTER:
            assert sampling.adapter is not None  # see `to_request`
            adapters.preparations.add(
                preparation_id=number, adapter=types_pb2.Adapter(**sampling.adapter.fields())
            )
            continue
        if wanted.requirement.kind is RequirementKind.ENCODER_OUTPUT:
            prepare = worker_pb2.PrepareGrammars(pictures=[to_picture_preparation(wanted)])
            pictures.append(worker_pb2.AttachRequest(prepare=prepare))
            continue
        grammars.preparations.add(
            preparation_id=number,
            grammar=sampling.grammar,
            output_token_ids=wanted.output_token_ids.tobytes(),
        )
    frames = []
    if grammars.preparations or grammars.dropped_ids:
        frames.append(worker_pb2.AttachRequest(prepare=grammars))
    if adapters.preparations or adapters.dropped_ids:
        frames.append(worker_pb2.AttachRequest(prepare_adapters=adapters))
    return frames + pictures  # last, since what is dropped makes room


def to_transfers(orders: TransferOrders) -> list[worker_pb2.AttachRequest]:
    """Contents to drop, and transfers to begin and to end, as the worker's frames."""
    frames = []
    if (drops := orders.drops) is not None:
        drop = worker_pb2.DropBlocks(tier=DISK_TIER, keys=pack(drops.keys, UINT64))
        drop.all = drops.is_all
        frames.append(worker_pb2.AttachRequest(drop=drop))
    for transfer in orders.fetches:
        frames.append(worker_pb2.AttachRequest(fetch=worker_pb2.FetchBlocks()))
        _fill_transfer(frames[-1].fetch, transfer)
    for transfer in orders.stores:
        frames.append(worker_pb2.AttachRequest(store=worker_pb2.StoreBlocks()))
        _fill_transfer(frames[-1].store, transfer)
    if orders.cancelled_ids:
        cancel = worker_pb2.CancelTransfers(transfer_ids=orders.cancelled_ids)
        frames.append(worker_pb2.AttachRequest(cancel_transfers=cancel))
    return frames


def to_pulls(
    orders: PullOrders, peers: Mapping[str, worker_pb2.PeerKv]
) -> list[worker_pb2.AttachRequest]:
    """Pulls from peers, which are by source, and those to end, as the worker's frames."""
    frames = []
    for pull in orders.pulls:
        fetch = worker_pb2.FetchBlocks(
            transfer_id=pull.transfer_id,
            block_ids=pack(pull.block_ids),
            source_block_ids=pack(pull.source_block_ids),
            peer=peers[pull.source],
        )
        frames.append(worker_pb2.AttachRequest(fetch=fetch))
    if orders.cancelled_ids:
        cancel = worker_pb2.CancelTransfers(transfer_ids=orders.cancelled_ids)
        frames.append(worker_pb2.AttachRequest(cancel_transfers=cancel))
    return frames


def _fill_transfer(
    message: worker_pb2.FetchBlocks | worker_pb2.StoreBlocks, transfer: BlockTransfer
) -> None:
    message.transfer_id = transfer.transfer_id
    message.tier = _TIERS[transfer.tier]
    message.block_ids = pack(transfer.block_ids)
    message.keys = pack(transfer.keys, UINT64)
    if transfer.tier is TierName.HOST:
        message.tier_block_ids = pack(transfer.tier_blocks)
    else:  # the numbers are the core's own
        message.contents = b"".join(transfer.contents)


def to_logprobs(output: worker_pb2.ModelRunnerOutput) -> LogprobColumns | None:
    """The log probabilities in a worker's answer; rows index tokens as in `to_result`."""
    if not output.HasField("logprobs"):
        return None
    return LogprobColumns.unpack(output.logprobs, len(output.token_ids) // INT32.itemsize)


def to_state(output: worker_pb2.ModelRunnerOutput) -> StateHashes | None:
    """The slots' hashes; None unless the step asked for them. Raises BadColumn."""
    if not output.HasField("state"):
        return None
    return StateHashes.unpack(output.state.slots, output.state.hashes)


def to_prompt_outputs(output: worker_pb2.ModelRunnerOutput) -> list[PromptOutput]:
    """The prompt outputs in a worker's answer. Raises BadColumn."""
    return [PromptOutput.unpack(prompt_output) for prompt_output in output.prompt_outputs]


def to_result(
    output: worker_pb2.ModelRunnerOutput, prompt_outputs: Sequence[PromptOutput] = ()
) -> StepResult:
    """A worker's answer as a value of the core."""
    status = unpack(output.row_status, UINT8, name="row_status")
    return StepResult(
        step_id=output.step_id,
        token_ids=unpack(output.token_ids, name="token_ids").astype(np.int32, copy=False),
        bad_rows=tuple(np.flatnonzero(status).tolist()),
        dead_ends={error.row: error.message for error in output.row_errors},
        num_sampled=_ranges(output.num_sampled),
        prompt_outputs=tuple(
            ReceivedPromptOutput(r.owner, r.begin, r.end, r.is_finite) for r in prompt_outputs
        ),
    )


def _ranges(num_sampled: bytes) -> NDArray[np.int32] | None:
    """Tokens per row; None: one each."""
    if not num_sampled:
        return None
    return unpack(num_sampled, name="num_sampled").astype(np.int32, copy=False)


def to_usage(finished: Finished) -> types_pb2.Usage:
    """Token counts of a finished request."""
    return types_pb2.Usage(
        prompt_tokens=finished.num_prompt_tokens,
        completion_tokens=finished.num_output_tokens,
        cached_tokens=finished.num_cached_tokens,
    )


def to_finished(finished: Finished, status_code: int) -> scheduler_pb2.Finished:
    """The end of a request as a gateway's message; status_code is 0 unless it failed."""
    return scheduler_pb2.Finished(
        handle=finished.request.handle,
        reason=FINISH_REASONS[finished.reason],
        stop_token_id=finished.stop_token_id,
        usage=to_usage(finished),
        status_code=status_code,
        message=finished.message,
    )


def to_tokens(
    handles: np.ndarray[tuple[int], np.dtype[np.uint32]],
    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
    logprobs: LogprobColumns | None,
) -> scheduler_pb2.SessionResponse:
    """Tokens of one client as columns."""
    return scheduler_pb2.SessionResponse(
        handles=handles.astype(UINT32, copy=False).tobytes(),
        token_ids=token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=None if logprobs is None else types_pb2.LogprobColumns(**logprobs.pack()),
    )


def to_prompt_output(prompt_output: PromptOutput) -> types_pb2.PromptOutput:
    """Prompt outputs as a gateway's message."""
    logprobs = prompt_output.logprobs
    return types_pb2.PromptOutput(
        logprobs=None if logprobs is None else types_pb2.LogprobColumns(**logprobs.pack()),
        **prompt_output.pack(),
    )


def to_token_logprobs(logprobs: LogprobColumns, num_top: int) -> list[types_pb2.TokenLogprobs]:
    """One message per row, with the first `num_top` tokens that it reports."""
    return [
        types_pb2.TokenLogprobs(
            logprob=logprobs.logprobs[row],
            rank=logprobs.ranks[row],
            top_token_ids=logprobs.top_token_ids[row, :num_top],
            top_logprobs=logprobs.top_logprobs[row, :num_top],
        )
        for row in range(len(logprobs))
    ]
