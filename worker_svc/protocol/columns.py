"""Decodes packed columns to arrays and checks them against the limits; errors name the field."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wire.columns import BadColumn, unpack
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import BadStep, IntColumn, Limits

Integers = NDArray[np.integer[Any]]


def column(packed: bytes, name: str) -> Integers:
    """Decodes an int32 column. Raises BadStep if the bytes are no such column."""
    try:
        return unpack(packed, name=name)
    except BadColumn as error:
        raise BadStep(name, str(error).removeprefix(f"{name}: ")) from error


def slots(packed: bytes, name: str, limits: Limits) -> IntColumn:
    """Decodes slot indices, each below max_num_seqs, as int64."""
    found = column(packed, name)
    check_range(found, 0, limits.max_num_seqs, name, "slot")
    return found.astype(np.int64)


def distinct_slots(packed: bytes, name: str, limits: Limits) -> IntColumn:
    """Decodes slot indices without repetition, as int64."""
    found = slots(packed, name, limits)
    if len(np.unique(found)) != len(found):
        raise BadStep(name, "a slot appears twice")
    return found


def block_ids(packed: bytes, name: str, limits: Limits) -> Integers:
    """Decodes ids of KV blocks on the device, without the null block."""
    found = column(packed, name)
    # Block 0 is the null block: it pads block tables and belongs to no sequence.
    check_range(found, 1, limits.num_blocks, name, "block")
    return found


def block_table(
    packed: bytes, name: str, group: LayerGroup, num_computed: int, limits: Limits
) -> Integers:
    """Decodes a group's block table of a sequence with so many computed tokens.

    The null block may stand where the group's window has passed, and nowhere else.
    """
    found = column(packed, name)
    if len(found) > (most := group.num_blocks(limits.max_model_len)):
        raise BadStep(name, f"{len(found)} blocks, {most} hold max_model_len")
    num_unread = group.num_unread(num_computed)
    check_range(found[:num_unread], 0, limits.num_blocks, name, "block")
    check_range(found[num_unread:], 1, limits.num_blocks, name, "block")
    return found


def host_block_ids(packed: bytes, name: str, limits: Limits) -> Integers:
    """Decodes ids of KV blocks in host memory."""
    found = column(packed, name)
    check_range(found, 0, limits.num_host_blocks, name, "host block")
    return found


def state_snapshots(packed: bytes, name: str, limits: Limits) -> Integers:
    """Decodes numbers of snapshots without repetition."""
    found = column(packed, name)
    check_range(found, 1, limits.num_state_snapshots + 1, name, "snapshot")
    if len(np.unique(found)) != len(found):
        raise BadStep(name, "a snapshot appears twice")
    return found


def pairs(
    sources: tuple[str, Integers], targets: tuple[str, Integers]
) -> tuple[IntColumn, IntColumn]:
    """Checks (name, ids) columns of block copies: equal lengths, no target twice. Returns int64."""
    (from_name, from_ids), (to_name, to_ids) = sources, targets
    if len(from_ids) != len(to_ids):
        raise BadStep(to_name, f"{len(to_ids)} blocks for {len(from_ids)} {from_name}")
    if len(np.unique(to_ids)) != len(to_ids):
        raise BadStep(to_name, "a block appears twice")
    return from_ids.astype(np.int64), to_ids.astype(np.int64)


def check_range(found: Integers, low: int, end: int, name: str, what: str) -> None:
    """Raises BadStep for the first value outside low..end - 1."""
    if len(found) and (found.min() < low or found.max() >= end):
        worst = found[(found < low) | (found >= end)][0]
        raise BadStep(name, f"{what} {worst} is not in {low}..{end - 1}")
