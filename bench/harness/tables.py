"""Pages for sequences that a benchmark lets enter a runner by itself, by KV group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.config import WorkerConfig
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import NewSequence, RowSampling
from worker_svc.startup.startup import LoadedModel


@dataclass(frozen=True, slots=True)
class Room:
    """The pages of every sequence of a runner that a benchmark fills."""

    groups: Sequence[LayerGroup]
    num_tokens: int  # for so many, of which those before a window keep their pages too


def num_pages(groups: Sequence[LayerGroup], num_tokens: int) -> int:
    """Pages of a sequence that keeps so many tokens in every group, those before a window too."""
    return sum(group.num_blocks(num_tokens) for group in groups)


def tables(
    groups: Sequence[LayerGroup], num_tokens: int, slot: int
) -> tuple[NDArray[np.int32], tuple[NDArray[np.int32], ...]]:
    """A slot's own block table of group 0, and of each group after it.

    Page 0 is the null block. Slots of as many tokens have pages that follow each other.
    """
    first, found = 1 + slot * num_pages(groups, num_tokens), []
    for group in groups:
        count = group.num_blocks(num_tokens)
        found.append(np.arange(first, first + count, dtype=np.int32))
        first += count
    return found[0], tuple(found[1:])


def entering(
    slot: int,
    token_ids: NDArray[np.int32],
    num_computed: int,
    room: Room,
    sampling: RowSampling,
) -> NewSequence:
    """A sequence that enters with pages of its own.

    If its model has states, those after its computed tokens are of the first snapshot: zeros.
    """
    table, others = tables(room.groups, room.num_tokens, slot)
    return NewSequence(
        slot=slot,
        request_id=str(slot),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=num_computed,
        block_ids=table,
        sampling=sampling,
        group_block_ids=others,
        state_snapshot=1 if num_computed else 0,
    )


def pages_for(model: LoadedModel, config: WorkerConfig, num_rows: int) -> int:
    """Pages of a runner in which so many rows have the longest context."""
    plan, longest = model.kv_plan, model.facts.max_model_len
    groups = (LayerGroup(config.block_size),) if plan is None else plan.groups
    return 2 + num_rows * num_pages(groups, longest)
