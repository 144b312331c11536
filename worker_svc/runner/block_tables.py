"""The block tables of all slots: one row per slot, in which the tables of all groups lie.

What is checked here knows counts of blocks alone, which are the host's; the rows are the device's.
"""

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import BadStep, IntColumn, NewSequence, no_entries


def tables_of(sequence: NewSequence) -> tuple[NDArray[np.int32], ...]:
    """A new sequence's block table of each group."""
    return sequence.block_ids, *sequence.group_block_ids


def entering_blocks(sequence: NewSequence) -> NDArray[np.int32]:
    """A new sequence's blocks as `enter_slots` reads them: of several tables with their numbers."""
    if not sequence.group_block_ids:
        return sequence.block_ids
    tables = tables_of(sequence)
    return np.concatenate(([len(table) for table in tables], *tables), dtype=np.int32)


def check_computed(group: LayerGroup, num_blocks: int, num_computed: int, name: str) -> None:
    """Raises BadStep unless a table of so many blocks has room for the computed tokens."""
    if num_blocks < group.num_blocks(num_computed):
        raise BadStep(
            name,
            f"{num_blocks} blocks for {num_computed} computed tokens of block_size "
            f"{group.block_size}",
        )


def append(
    num_blocks: NDArray[np.int64], slots: IntColumn, num_tokens: NDArray[np.int64], most: int
) -> IntColumn:
    """Counts a block more for each of `slots`; returns where in its table each one goes.

    `num_blocks` and `num_tokens` are of all slots. Raises BadStep for a slot without tokens, which
    is empty, and for one that would hold more than `most` blocks.
    """
    if not len(slots):
        return no_entries()
    empty = slots[num_tokens[slots] == 0]
    if len(empty):
        raise BadStep("appended_slots", f"slot {empty[0]} is empty")
    # A slot may repeat: its n-th block here goes n places after its table's end.
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    places = np.empty_like(slots)
    places[order] = np.arange(len(slots)) - np.searchsorted(ordered, ordered)
    places += num_blocks[slots]
    if places.max() >= most:
        slot = slots[places.argmax()]
        raise BadStep(
            "appended_slots",
            f"slot {slot} would hold {places.max() + 1} blocks, {most} hold max_model_len",
        )
    np.add.at(num_blocks, slots, 1)
    return places
