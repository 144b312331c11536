"""Converts between protobuf frames and step values; the only module that reads step frames.

It checks frames against the limits; the batch state checks what depends on the slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pagewire.v1 import timing_pb2, types_pb2, worker_pb2
from wire.columns import UINT8, pack
from wire.prompt_outputs import PromptOutput
from wire.tracing.context import context_from_proto
from worker_svc.protocol import columns
from worker_svc.protocol.pictures import to_placed_pictures
from worker_svc.protocol.row_sampling import read_sampling
from worker_svc.protocol.step import (
    BadStep,
    CutRequest,
    GroupBlocks,
    IntColumn,
    Limits,
    NewSequence,
    RowSampling,
    SaveRequest,
    StepInput,
    StepMoves,
    StepOutput,
)

MAX_GRANTED_STEPS = 64  # per frame; they run without further messages
# The key of field 3 of AttachRequest. Not told by the size: a later version may add to a cut.
_CUT_TAG = bytes([worker_pb2.AttachRequest.CUT_FIELD_NUMBER << 3 | 2])
_MOVES = (
    "swapped_out_block_ids",
    "to_host_block_ids",
    "from_host_block_ids",
    "swapped_in_block_ids",
    "copied_from_block_ids",
    "copied_to_block_ids",
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a stream: protocol version, the scheduler's epoch, its first step id."""

    protocol_version: int
    epoch: int
    first_step_id: int
    heartbeat_interval_s: float | None = None  # None: no heartbeats
    protocol_minor: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Frame counts of a stream so far and the running step, sent on an idle stream."""

    num_frames_received: int
    num_frames_sent: int
    running_step_id: int  # 0: no step is being computed
    running_s: float
    is_draining: bool = False


def decode_hello(frame: bytes) -> Hello:
    """Decodes the first frame of a stream. Raises BadStep for any other frame."""
    message = _parse(frame)
    if message.WhichOneof("frame") != "hello":
        raise BadStep("frame", "the first frame of a stream must be hello")
    hello = message.hello
    interval_ms = hello.heartbeat_interval_ms
    return Hello(
        hello.protocol_version,
        hello.epoch,
        hello.first_step_id,
        interval_ms / 1e3 if interval_ms else None,
        hello.protocol_minor,
    )


def decode_cut(frame: bytes) -> CutRequest | None:
    """Decodes a cut; None for any other frame. Raises BadStep for an invalid range."""
    if not frame.startswith(_CUT_TAG):  # a step, parsed only once
        return None
    try:
        message = worker_pb2.AttachRequest.FromString(frame)
    except DecodeError:
        return None  # refused when it is executed
    if message.WhichOneof("frame") != "cut":
        return None
    cut = message.cut
    if not 0 < cut.first_step_id <= cut.last_step_id:
        raise BadStep("cut", f"steps {cut.first_step_id} to {cut.last_step_id} are no range")
    return CutRequest(cut.first_step_id, cut.last_step_id)


def decode_step(frame: bytes, limits: Limits) -> StepInput:
    """Decodes a step frame. Raises BadStep, naming the invalid field."""
    message = _parse(frame)
    if message.WhichOneof("frame") != "step":
        raise BadStep("frame", "every frame after the first must be step")
    step = message.step
    appended_slots, appended_block_ids = _appended(
        ("appended_slots", step.appended_slots),
        ("appended_block_ids", step.appended_block_ids),
        limits,
    )
    slots, num_scheduled = _rows(step, limits)
    num_drafted, draft_token_ids = _drafts(step, num_scheduled, limits)
    _check_grant(step)
    return StepInput(
        step_id=step.step_id,
        ack_step_id=step.ack_step_id,
        reset=step.reset,
        freed_slots=columns.distinct_slots(step.freed_slots, "freed_slots", limits),
        new_sequences=tuple(
            _new_sequence(sequence, f"new_sequences[{index}]", limits)
            for index, sequence in enumerate(step.new_sequences)
        ),
        appended_slots=appended_slots,
        appended_block_ids=appended_block_ids,
        moves=_moves(step, limits),
        same_rows=step.same_rows,
        slots=slots,
        num_scheduled=num_scheduled,
        granted_steps=step.granted_steps,
        wants_state=step.wants_state,
        num_drafted=num_drafted,
        draft_token_ids=draft_token_ids,
        state_saves=_state_saves(step, limits),
        appended_to_groups=_appended_to_groups(step, limits) if step.appended_to_groups else (),
    )


def encode_skipped(first_step_id: int, last_step_id: int) -> bytes:
    """Encodes the frame that answers a cut."""
    skipped = worker_pb2.Skipped(first_step_id=first_step_id, last_step_id=last_step_id)
    return worker_pb2.AttachResponse(skipped=skipped).SerializeToString()


def _appended(
    slots: tuple[str, bytes], block_ids: tuple[str, bytes], limits: Limits
) -> tuple[IntColumn, IntColumn]:
    """Slots and the block that each gains, out of columns (name, bytes)."""
    found_slots = columns.slots(slots[1], slots[0], limits)
    found_ids = columns.block_ids(block_ids[1], block_ids[0], limits)
    if len(found_slots) != len(found_ids):
        raise BadStep(block_ids[0], f"{len(found_ids)} blocks for {len(found_slots)} {slots[0]}")
    return found_slots, found_ids.astype(np.int64)


def _appended_to_groups(
    step: worker_pb2.SchedulerOutput, limits: Limits
) -> tuple[GroupBlocks, ...]:
    name, found, before = "appended_to_groups", [], 0
    for message in step.appended_to_groups:
        if not before < message.group < len(limits.groups):
            reason = f"group {message.group} after {before}, of {len(limits.groups)} kv_groups"
            raise BadStep(name, reason)
        slots, block_ids = _appended(
            (f"{name}.slots", message.slots), (f"{name}.block_ids", message.block_ids), limits
        )
        found.append(GroupBlocks(message.group, slots, block_ids))
        before = message.group
    return tuple(found)


def _moves(step: worker_pb2.SchedulerOutput, limits: Limits) -> StepMoves | None:
    if not any(getattr(step, name) for name in _MOVES):  # nearly always
        return None

    def read(
        name: str, reader: Callable[[bytes, str, Limits], columns.Integers]
    ) -> tuple[str, columns.Integers]:
        return name, reader(getattr(step, name), name, limits)

    device, host = columns.block_ids, columns.host_block_ids
    swapped_out, to_host = columns.pairs(
        read("swapped_out_block_ids", device), read("to_host_block_ids", host)
    )
    from_host, swapped_in = columns.pairs(
        read("from_host_block_ids", host), read("swapped_in_block_ids", device)
    )
    copied_from, copied_to = columns.pairs(
        read("copied_from_block_ids", device), read("copied_to_block_ids", device)
    )
    return StepMoves(swapped_out, to_host, from_host, swapped_in, copied_from, copied_to)


def _state_saves(step: worker_pb2.SchedulerOutput, limits: Limits) -> tuple[SaveRequest, ...]:
    if not step.state_save_slots:  # nearly always
        return ()
    slots = columns.slots(step.state_save_slots, "state_save_slots", limits)
    positions = columns.column(step.state_save_positions, "state_save_positions")
    columns.check_range(positions, 1, limits.max_model_len + 1, "state_save_positions", "position")
    snapshots = columns.state_snapshots(step.state_save_snapshots, "state_save_snapshots", limits)
    for name, column in (("positions", positions), ("snapshots", snapshots)):
        if len(column) != len(slots):
            raise BadStep(f"state_save_{name}", f"{len(column)} for {len(slots)} state_save_slots")
    saves = zip(slots.tolist(), positions.tolist(), snapshots.tolist(), strict=True)
    return tuple(SaveRequest(*save) for save in saves)


def encode_output(output: StepOutput) -> bytes:
    """Encodes the frame that answers a step."""
    status = b"" if output.row_status is None else pack(output.row_status, UINT8)
    timings = output.timings
    logprobs, state = output.logprobs, output.state
    message = worker_pb2.ModelRunnerOutput(
        step_id=output.step_id,
        token_ids=pack(output.token_ids),
        row_status=status,
        error=output.error,
        timings=timing_pb2.StepTimings(
            queue_us=timings.queue_us,
            prepare_us=timings.prepare_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
            copy_us=timings.copy_us,
            idle_us=timings.idle_us,
        ),
        logprobs=None if logprobs is None else types_pb2.LogprobColumns(**logprobs.pack()),
        prompt_outputs=map(_encode_prompt_output, output.prompt_outputs),
        state=None if state is None else worker_pb2.StateHashes(**state.pack()),
        num_sampled=b"" if output.num_sampled is None else pack(output.num_sampled),
        row_errors=[
            worker_pb2.RowError(row=row, message=problem)
            for row, problem in output.row_errors.items()
        ],
    )
    return worker_pb2.AttachResponse(output=message).SerializeToString()


def _encode_prompt_output(prompt_output: PromptOutput) -> types_pb2.PromptOutput:
    logprobs = prompt_output.logprobs
    return types_pb2.PromptOutput(
        logprobs=None if logprobs is None else types_pb2.LogprobColumns(**logprobs.pack()),
        **prompt_output.pack(),
    )


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Encodes a heartbeat frame."""
    message = worker_pb2.Heartbeat(
        num_frames_received=heartbeat.num_frames_received,
        num_frames_sent=heartbeat.num_frames_sent,
        running_step_id=heartbeat.running_step_id,
        running_ms=round(heartbeat.running_s * 1e3),
        is_draining=heartbeat.is_draining,
    )
    return worker_pb2.AttachResponse(heartbeat=message).SerializeToString()


def _parse(frame: bytes) -> worker_pb2.AttachRequest:
    try:
        return worker_pb2.AttachRequest.FromString(frame)
    except DecodeError as error:
        raise BadStep("frame", f"{len(frame)} bytes that do not parse") from error


def _rows(step: worker_pb2.SchedulerOutput, limits: Limits) -> tuple[IntColumn, IntColumn]:
    if step.same_rows:
        for name in ("slots", "num_scheduled"):
            if getattr(step, name):
                raise BadStep(name, "must be empty with same_rows")
    slots = columns.distinct_slots(step.slots, "slots", limits)
    num_scheduled = columns.column(step.num_scheduled, "num_scheduled").astype(np.int64)
    if not len(num_scheduled):
        num_scheduled = np.ones(len(slots), dtype=np.int64)
    if len(num_scheduled) != len(slots):
        raise BadStep("num_scheduled", f"{len(num_scheduled)} counts for {len(slots)} slots")
    if len(slots) and num_scheduled.min() < 1:
        raise BadStep("num_scheduled", f"{num_scheduled.min()} is not a number of tokens")
    num_tokens = int(num_scheduled.sum())
    if num_tokens > limits.max_num_batched_tokens:
        raise BadStep(
            "num_scheduled",
            f"{num_tokens} tokens, max_num_batched_tokens is {limits.max_num_batched_tokens}",
        )
    return slots, num_scheduled


def _drafts(
    step: worker_pb2.SchedulerOutput, num_scheduled: IntColumn, limits: Limits
) -> tuple[IntColumn, IntColumn]:
    """The number of each row's tokens that are drafts, and these; none: the worker makes them."""
    num_drafted = columns.column(step.num_drafted, "num_drafted").astype(np.int64)
    token_ids = columns.column(step.draft_token_ids, "draft_token_ids").astype(np.int64)
    if len(num_drafted) not in (0, len(num_scheduled)):
        raise BadStep("num_drafted", f"{len(num_drafted)} counts for {len(num_scheduled)} rows")
    if len(num_drafted):
        if num_drafted.min() < 0 or (num_drafted >= num_scheduled).any():
            raise BadStep("num_drafted", "a row's last known token is computed with its drafts")
        columns.check_range(token_ids, 0, limits.vocab_size, "draft_token_ids", "token")
    if len(token_ids) and len(token_ids) != num_drafted.sum():
        drafted = num_drafted.sum()
        raise BadStep("draft_token_ids", f"{len(token_ids)} tokens, num_drafted says {drafted}")
    return num_drafted, token_ids


def _check_grant(step: worker_pb2.SchedulerOutput) -> None:
    if step.granted_steps > MAX_GRANTED_STEPS:
        raise BadStep(
            "granted_steps", f"{step.granted_steps}, max_granted_steps is {MAX_GRANTED_STEPS}"
        )
    for name in ("reset", "new_sequences", "num_scheduled", "num_drafted"):
        if step.granted_steps and getattr(step, name):
            raise BadStep(name, "must be empty with granted_steps: every row decodes")


def _new_sequence(message: worker_pb2.NewSequence, name: str, limits: Limits) -> NewSequence:
    if message.slot >= limits.max_num_seqs:
        raise BadStep(f"{name}.slot", f"{message.slot}, max_num_seqs is {limits.max_num_seqs}")
    token_ids = columns.column(message.token_ids, f"{name}.token_ids")
    if not 1 <= len(token_ids) <= limits.max_model_len:
        raise BadStep(
            f"{name}.token_ids",
            f"{len(token_ids)} tokens, must be 1 to max_model_len {limits.max_model_len}",
        )
    sampling = read_sampling(message.sampling, limits)
    token_ids, sampling = _known_tokens(token_ids, sampling, limits)
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise BadStep(
            f"{name}.num_prompt_tokens",
            f"{message.num_prompt_tokens}, must be 1 to the {len(token_ids)} token_ids",
        )
    if message.prompt_only and message.num_prompt_tokens < len(token_ids):
        raise BadStep(f"{name}.prompt_only", "there is output already")
    if message.num_computed_tokens >= len(token_ids):
        raise BadStep(
            f"{name}.num_computed_tokens",
            f"{message.num_computed_tokens} leaves none of {len(token_ids)} tokens to compute",
        )
    if message.state_snapshot > limits.num_state_snapshots:
        raise BadStep(
            f"{name}.state_snapshot",
            f"{message.state_snapshot}, there are {limits.num_state_snapshots}",
        )
    block_ids, *others = _tables(message, name, limits)
    return NewSequence(
        slot=message.slot,
        request_id=message.request_id,
        token_ids=token_ids.astype(np.int32),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling,
        prompt_output_begin=message.prompt_output_begin,
        prompt_only=message.prompt_only,
        grammar_preparation=message.grammar_preparation,
        adapter_preparation=message.adapter_preparation,
        trace=context_from_proto(message.trace) if message.HasField("trace") else None,
        state_snapshot=message.state_snapshot,
        group_block_ids=tuple(others),
        pictures=to_placed_pictures(message),
    )


def _tables(message: worker_pb2.NewSequence, name: str, limits: Limits) -> list[NDArray[np.int32]]:
    """The sequence's block table of each group."""
    groups, given = limits.groups, message.group_block_ids
    if len(given) != len(groups) - 1:
        reason = f"{len(given)} tables after that of group 0, of {len(groups)} kv_groups"
        raise BadStep(f"{name}.group_block_ids", reason)
    names = [f"{name}.block_ids", *(f"{name}.group_block_ids[{n}]" for n in range(len(given)))]
    num_computed = message.num_computed_tokens
    return [
        columns.block_table(packed, named, group, num_computed, limits).astype(np.int32)
        for packed, named, group in zip((message.block_ids, *given), names, groups, strict=True)
    ]


def _known_tokens(
    token_ids: columns.Integers, sampling: RowSampling, limits: Limits
) -> tuple[columns.Integers, RowSampling]:
    """Tokens that the model can compute; unknown ones become 0, and the row is refused."""
    is_unknown = (token_ids < 0) | (token_ids >= limits.vocab_size)
    if not is_unknown.any():
        return token_ids, sampling
    problem = f"token_ids: {token_ids[is_unknown][0]} is not in 0..{limits.vocab_size - 1}"
    return np.where(is_unknown, 0, token_ids), replace(sampling, refusal=problem)
