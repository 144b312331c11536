"""Converts frames about blocks that are copied apart from the steps."""

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pagewire.v1 import worker_pb2
from wire.columns import UINT64, BadColumn, pack, unpack
from wire.versions import DISK_TIER, HOST_TIER
from worker_svc.protocol import columns
from worker_svc.protocol.step import BadStep, IntColumn, Limits, no_entries

_FIELDS = worker_pb2.AttachRequest
_TAGS = tuple(
    bytes([number << 3 | 2])  # length-delimited
    for number in (
        _FIELDS.FETCH_FIELD_NUMBER,
        _FIELDS.STORE_FIELD_NUMBER,
        _FIELDS.CANCEL_TRANSFERS_FIELD_NUMBER,
        _FIELDS.DROP_FIELD_NUMBER,
    )
)
Keys = NDArray[np.uint64]  # [n, 2]


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Blocks to copy between the cache and a tier."""

    transfer_id: int
    is_fetch: bool  # into the cache
    block_ids: IntColumn
    tier_blocks: IntColumn  # one per block, numbered from 1; empty where they have no numbers
    keys: Keys
    tier: str = HOST_TIER
    contents: tuple[bytes, ...] = ()  # one per block where they have no numbers


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker, whose blocks can be fetched."""

    address: str  # where the scheduler reaches it
    incarnation: int
    transport: str
    handle: bytes
    server_name: str = ""  # of its certificate; empty: the address's host


@dataclass(frozen=True, slots=True)
class PeerOrder:
    """Blocks of the cache to fill from another worker's."""

    transfer_id: int
    block_ids: IntColumn
    source_block_ids: IntColumn  # one per block
    peer: Peer


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Transfers that need not go on."""

    transfer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Contents that a tier need not keep."""

    tier: str
    keys: Keys
    is_all: bool


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """The end of a transfer: how much of it is whole, and why not all."""

    num_blocks: int  # leading blocks that are whole
    problem: str = ""  # empty if all are
    num_bytes: int = 0
    duration_s: float = 0.0
    queued_s: float = 0.0


TierFrame = TransferOrder | PeerOrder | CancelOrder | DropOrder


def decode_transfer(frame: bytes, limits: Limits) -> TierFrame | None:
    """Decodes a frame about transfers; None for any other. Raises BadStep."""
    if not frame.startswith(_TAGS):  # a step, parsed only once
        return None
    try:
        message = worker_pb2.AttachRequest.FromString(frame)
    except DecodeError:
        return None  # refused when it is executed
    match message.WhichOneof("frame"):
        case "fetch" if message.fetch.HasField("peer"):
            return _peer_order(message.fetch, limits)
        case "fetch":
            return _order("fetch", message.fetch, limits)
        case "store":
            return _order("store", message.store, limits)
        case "cancel_transfers":
            return CancelOrder(tuple(message.cancel_transfers.transfer_ids))
        case "drop":
            return _drop(message.drop, limits)
    return None


def _peer_order(message: worker_pb2.FetchBlocks, limits: Limits) -> PeerOrder:
    if not message.transfer_id:
        raise BadStep("fetch.transfer_id", "must not be 0")
    if not limits.has_transports:
        raise BadStep("fetch.peer", "this worker has no transport")
    name, source_name = "fetch.block_ids", "fetch.source_block_ids"
    filled = name, columns.block_ids(message.block_ids, name, limits)
    sources = source_name, columns.column(message.source_block_ids, source_name)
    # How many blocks the other worker has, it knows itself.
    columns.check_range(sources[1], 1, 2**31, source_name, "block")
    if not len(filled[1]):
        raise BadStep(name, "there are none")
    theirs, ours = columns.pairs(sources, filled)
    told = message.peer
    peer = Peer(told.address, told.incarnation, told.transport, told.handle, told.server_name)
    return PeerOrder(message.transfer_id, ours, theirs, peer)


def _order(
    name: str, message: worker_pb2.FetchBlocks | worker_pb2.StoreBlocks, limits: Limits
) -> TransferOrder:
    if not message.transfer_id:
        raise BadStep(f"{name}.transfer_id", "must not be 0")
    _require_tier(name, message.tier, limits)
    if message.tier == DISK_TIER:
        return _order_by_content(name, message, limits)
    blocks_name, tier_name = f"{name}.block_ids", f"{name}.tier_block_ids"
    blocks = blocks_name, columns.block_ids(message.block_ids, blocks_name, limits)
    tier_blocks = tier_name, columns.column(message.tier_block_ids, tier_name)
    columns.check_range(tier_blocks[1], 1, limits.num_tier_blocks + 1, tier_name, "block")
    if not len(blocks[1]):
        raise BadStep(blocks_name, "there are none")
    is_fetch = name == "fetch"
    if is_fetch:
        stored, filled = columns.pairs(tier_blocks, blocks)
    else:
        filled, stored = columns.pairs(blocks, tier_blocks)
    return TransferOrder(
        message.transfer_id, is_fetch, filled, stored, _keys(name, message.keys, len(filled))
    )


def _require_tier(name: str, tier: str, limits: Limits) -> None:
    sizes = {HOST_TIER: limits.num_tier_blocks, DISK_TIER: limits.num_disk_blocks}
    if not sizes.get(tier):
        raise BadStep(f"{name}.tier", f"there is no tier {tier!r}")


def _order_by_content(
    name: str, message: worker_pb2.FetchBlocks | worker_pb2.StoreBlocks, limits: Limits
) -> TransferOrder:
    blocks_name, is_fetch = f"{name}.block_ids", name == "fetch"
    block_ids = columns.block_ids(message.block_ids, blocks_name, limits)
    if not len(block_ids):
        raise BadStep(blocks_name, "there are none")
    if is_fetch:  # none may be filled twice
        columns.pairs((blocks_name, block_ids), (blocks_name, block_ids))
    if message.tier_block_ids:
        raise BadStep(f"{name}.tier_block_ids", "blocks of this tier have no numbers")
    return TransferOrder(
        message.transfer_id,
        is_fetch,
        block_ids.astype(np.int64),
        no_entries(),
        _keys(name, message.keys, len(block_ids)),
        message.tier,
        _contents(name, message.contents, len(block_ids), limits.block_size),
    )


def content_bytes(block_size: int) -> tuple[int, int]:
    """The bytes of a block's content: without an origin, and with one."""
    return 8 + 4 * block_size, 8 + 16 + 4 * block_size  # parent, origin, tokens


def _contents(name: str, told: bytes, num_blocks: int, block_size: int) -> tuple[bytes, ...]:
    size, rest = divmod(len(told), num_blocks)
    if rest or size not in content_bytes(block_size):
        raise BadStep(f"{name}.contents", f"{len(told)} bytes are not those of {num_blocks} blocks")
    return tuple(told[begin : begin + size] for begin in range(0, len(told), size))


def _drop(message: worker_pb2.DropBlocks, limits: Limits) -> DropOrder:
    _require_tier("drop", message.tier, limits)
    if message.tier != DISK_TIER:
        raise BadStep("drop.tier", f"blocks of the tier {message.tier!r} are overwritten")
    return DropOrder(message.tier, _keys("drop", message.keys), message.all)


def _keys(name: str, packed: bytes, num_blocks: int | None = None) -> Keys:
    """Keys [n, 2], of so many blocks if that is given."""
    try:
        found = unpack(packed, UINT64, name=f"{name}.keys")
    except BadColumn as error:
        raise BadStep(f"{name}.keys", str(error).removeprefix(f"{name}.keys: ")) from error
    expected = len(found) // 2 if num_blocks is None else num_blocks
    if len(found) != 2 * expected:
        raise BadStep(f"{name}.keys", f"{len(found)} numbers, not two for each of {expected}")
    return found.reshape(expected, 2).astype(np.uint64, copy=False)


def encode_contents(tier: str, keys: Keys) -> bytes:
    """Encodes what a tier says that it holds."""
    told = worker_pb2.TierContents(tier=tier, keys=pack(keys, UINT64))
    return worker_pb2.AttachResponse(tier_contents=told).SerializeToString()


def encode_done(transfer_id: int, end: TransferEnd) -> bytes:
    """Encodes the answer to one transfer."""
    answer = worker_pb2.TransferDone(
        transfer_id=transfer_id,
        num_blocks=end.num_blocks,
        problem=end.problem,
        num_bytes=end.num_bytes,
        duration_us=round(end.duration_s * 1e6),
        queued_us=round(end.queued_s * 1e6),
    )
    return worker_pb2.AttachResponse(transfer_done=answer).SerializeToString()
