"""Batches for layers of the KV groups after group 0, made on the device as a graph repeats it.

Group 0's comes from the kernels that gather a step's inputs. The others' tables are copied out of
the slots' rows whole, by operations of torch: a model with one group launches none of them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch
from worker_svc.protocol.kv_groups import TablePart
from worker_svc.runner.device_slots import SlotsOnDevice


def with_groups(
    batch: AttentionBatch,
    held: SlotsOnDevice,
    slots: Tensor,
    positions: Tensor,
    sequences: Tensor | None = None,
) -> AttentionBatch:
    """A batch of group 0, for all groups.

    `slots` [B] are those of its sequences, below 0 of padding; `positions` [T] and `sequences` [T]
    those of its tokens. Without `sequences` each sequence has one token.
    """
    parts = held.tables.others
    if not parts:
        return batch
    rows = held.block_tables.index_select(0, slots.clamp(min=0))  # [B, all tables]
    if sequences is None:
        sequences = torch.arange(len(rows), device=rows.device)
    is_padding = batch.slot_mapping < 0
    others = tuple(_of_group(batch, part, rows, sequences, positions, is_padding) for part in parts)
    return replace(batch, others=others)


def _of_group(
    batch: AttentionBatch,
    part: TablePart,
    rows: Tensor,
    sequences: Tensor,
    positions: Tensor,
    is_padding: Tensor,
) -> AttentionBatch:
    size = part.group.block_size
    tables = rows[:, part.columns].contiguous()  # [B, W]
    places = sequences * part.width + positions // size
    blocks = tables.view(-1).index_select(0, places).long()  # [T]
    slot_mapping = (blocks * size + positions % size).masked_fill_(is_padding, -1)
    return replace(batch, slot_mapping=slot_mapping, block_tables=tables)


def sequences_of(firsts: Tensor, context_lens: Tensor, num_tokens: int) -> Tensor:
    """The sequence [T] of each token, of padding any one.

    `firsts` [B + 1] are the first tokens of sequences; those without a context are none.
    """
    ends = torch.where(context_lens > 0, firsts[1:], num_tokens).long()
    marks = torch.zeros(num_tokens + 1, dtype=torch.int64, device=firsts.device)
    passed = marks.index_add_(0, ends, torch.ones_like(ends)).cumsum(0)[:num_tokens]
    return passed.clamp_(max=len(context_lens) - 1)
