"""Converts host rows to the flat tensors of one forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch, LastTokens, StateCut
from worker_svc.device.transfer import upload
from worker_svc.protocol.kv_groups import TablePart
from worker_svc.protocol.step import IntColumn, Limits
from worker_svc.runner.batch_state import BatchState
from worker_svc.runner.rows import Rows, runs
from worker_svc.runner.state_saves import NONE_DUE, DueSaves


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of the model: T tokens of B rows, concatenated."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    logit_rows: Tensor | None  # [R] int64: tokens that need logits; None: all
    last: LastTokens | None = None  # the same, for layers that compute no other tokens


def build(state: BatchState, rows: Rows, saves: DueSaves = NONE_DUE) -> ModelInputs:
    """Gathers the rows' tokens and cache slots from the state's device rows."""
    num_scheduled = rows.num_scheduled
    ends = rows.num_computed + num_scheduled
    cu_seqlens = np.zeros(len(rows.slots) + 1, dtype=np.int64)
    np.cumsum(num_scheduled, out=cu_seqlens[1:])
    slots, positions = _slots_and_positions(rows, cu_seqlens)
    parts = state.tables.parts
    # One transfer of all indices to the device.
    token_index, positions_, row_slots, ends_, starts, last, who, *lookups = upload(
        state.device,
        slots * state.token_rows.shape[1] + positions,  # [T]
        positions,
        rows.slots,
        ends,
        cu_seqlens,
        _sampling_tokens(rows, cu_seqlens),
        np.flatnonzero(rows.samples),
        *(index for part in parts for index in _lookups(state, part, slots, positions)),
    )
    max_context_len, max_seqlen_q = int(ends.max()), int(num_scheduled.max())
    context_lens, starts, cuts = ends_.int(), starts.int(), _cuts(saves)
    batches = [
        AttentionBatch(
            slot_mapping=_kv_slots(state, part, block_index, in_block),
            block_tables=_tables(state, part, max_context_len).index_select(0, row_slots),
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            slots=row_slots,
            state_cuts=cuts,
            has_drafts=rows.drafts is not None,
        )
        for part, block_index, in_block in zip(parts, lookups[::2], lookups[1::2], strict=True)
    ]
    is_cuda = state.device.type == "cuda"
    num_decodes = int((num_scheduled != 1).argmax())  # the leading rows
    if is_cuda and num_decodes:
        batches = [replace(each, parts=_split(each, num_decodes)) for each in batches]
    attention = _of_groups(batches)
    has_last = is_cuda and not rows.is_decode and rows.drafts is None
    return ModelInputs(
        token_ids=state.token_rows.view(-1).index_select(0, token_index).long(),
        positions=positions_,
        attention=attention,
        logit_rows=None if rows.is_decode else last,
        last=last_tokens(last, who, attention) if has_last else None,
    )


def _cuts(saves: DueSaves) -> tuple[StateCut, ...]:
    """The places between tokens of rows at which snapshots of states are made."""
    return tuple(StateCut(due.row, due.num_tokens, due.snapshot) for due in saves.within)


def _lookups(
    state: BatchState, part: TablePart, slots: IntColumn, positions: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """The place of each token's [T] block of a group in the flat tables, and its place in that."""
    size = part.group.block_size
    blocks = positions // size
    if part.begin:
        blocks += part.begin
    return slots * state.block_tables.shape[1] + blocks, positions % size


def _kv_slots(state: BatchState, part: TablePart, block_index: Tensor, in_block: Tensor) -> Tensor:
    """The KV slots [T] of tokens in a group."""
    blocks = state.block_tables.view(-1).index_select(0, block_index)
    return torch.add(in_block, blocks, alpha=part.group.block_size)


def _tables(state: BatchState, part: TablePart, max_context_len: int) -> Tensor:
    """A group's block tables [max_num_seqs, W] of all slots, for contexts of so many tokens."""
    width = part.group.num_blocks(max_context_len)
    if state.device.type == "cuda":
        # Triton compiles for the row's stride: one for all steps.
        width = part.width
    return state.block_tables[:, part.begin : part.begin + width]


def _slots_and_positions(rows: Rows, cu_seqlens: IntColumn) -> tuple[IntColumn, IntColumn]:
    """The slot [T] and the position [T] of each token of a step."""
    if rows.is_decode:
        return rows.slots, rows.num_computed
    slots = np.repeat(rows.slots, rows.num_scheduled)
    offset = np.repeat(rows.num_computed - cu_seqlens[:-1], rows.num_scheduled)
    return slots, np.arange(cu_seqlens[-1]) + offset


def _sampling_tokens(rows: Rows, cu_seqlens: IntColumn) -> IntColumn:
    """The tokens [R] of a step whose logits are sampled from: each row's last, and its drafts."""
    last = cu_seqlens[1:][rows.samples] - 1
    if rows.drafts is None:
        return last
    num_drafted = rows.drafts.num_drafted[rows.samples]
    return runs(last - num_drafted, 1 + num_drafted)


def last_tokens(rows: Tensor, sequences: Tensor, batch: AttentionBatch) -> LastTokens:
    """The last tokens [R] of these sequences [R] of a batch."""
    batches = (
        AttentionBatch.of_decodes(
            each.slot_mapping.index_select(0, rows),
            each.block_tables.index_select(0, sequences),
            each.context_lens.index_select(0, sequences),
            each.max_context_len,
        )
        for each in (batch, *batch.others)
    )
    return LastTokens(rows, _of_groups(batches))


def _of_groups(batches: Iterable[AttentionBatch]) -> AttentionBatch:
    """The batch of group 0, which leads to those of the others."""
    first, *others = batches
    return replace(first, others=tuple(others)) if others else first


def _split(batch: AttentionBatch, num_decodes: int) -> tuple[AttentionBatch, AttentionBatch]:
    """Splits a batch into the leading decodes, which have a much faster kernel, and the rest.

    The rest is copied: Triton would compile anew for pointers into the middle of a tensor.
    """
    first, rest = slice(num_decodes), slice(num_decodes, None)
    decodes = AttentionBatch(
        slot_mapping=batch.slot_mapping[first],
        block_tables=batch.block_tables[first],
        context_lens=batch.context_lens[first],
        cu_seqlens_q=batch.cu_seqlens_q[: num_decodes + 1],
        max_seqlen_q=1,
        max_context_len=batch.max_context_len,
    )
    prompts = AttentionBatch(
        slot_mapping=batch.slot_mapping[rest],
        block_tables=batch.block_tables[rest].clone(),
        context_lens=batch.context_lens[rest].clone(),
        cu_seqlens_q=batch.cu_seqlens_q[rest] - num_decodes,
        max_seqlen_q=batch.max_seqlen_q,
        max_context_len=batch.max_context_len,
    )
    return decodes, prompts


def build_idle(limits: Limits, lengths: list[int], device: torch.device) -> ModelInputs:
    """Inputs of a step without a request: token 0 everywhere, no cache slot written."""
    ends = np.array(lengths, dtype=np.int32)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(ends, out=cu_seqlens[1:])
    positions = np.concatenate([np.arange(length) for length in lengths])
    batches = (
        AttentionBatch(
            slot_mapping=torch.full((len(positions),), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros((len(lengths), part.width), dtype=torch.int32, device=device),
            context_lens=torch.from_numpy(ends).to(device),
            cu_seqlens_q=torch.from_numpy(cu_seqlens).to(device),
            max_seqlen_q=max(lengths),
            max_context_len=max(lengths),
        )
        for part in limits.tables.parts
    )
    return ModelInputs(
        token_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        attention=_of_groups(batches),
        logit_rows=None,
    )
