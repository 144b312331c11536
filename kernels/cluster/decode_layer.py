"""A decoder layer for one token in two launches; `decode_layer.cu` says how.

    residual [1, N] bfloat16, partials [P, N] float32  ->  the same of the next block

The residual of a block is what it reads plus its partials, summed in order. Buffers are the
caller's; a block never writes what it reads.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cluster.program import Launch, Program

SOURCE = Path(__file__).with_name("decode_layer.cu")
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for one block or two
_RESERVED_BYTES = 1 << 10  # of each block, by the system
_WARP = 32
_TILE = 16  # rows of a weight that tensor cores take at once
_SPAN = 32  # columns
_MLP_BYTES = 3 << 10  # of a block of the MLP in addition to its weights, about
_MOST_HELD = 1  # tiles of gate and up rows in registers


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class LayerTiling:
    """The cut of a layer: blocks of a cluster, clusters of the MLP, threads of a block."""

    cluster: int = 8
    mlp_clusters: int = 7
    threads: int = 512


def why_unsuitable(shape: LayerShape, tiling: LayerTiling) -> str:
    """Why these kernels cannot run the layer; empty if they can."""
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    cluster = tiling.cluster
    if rest or shape.head_dim not in (64, 128) or shape.hidden % _SPAN or group > 8:
        return f"heads {shape.num_heads}/{shape.num_kv_heads} of {shape.head_dim}"
    if (group + 2) * shape.head_dim % cluster or shape.hidden % (2 * cluster):
        return f"{cluster} blocks do not share {group} + 2 heads and {shape.hidden} outputs evenly"
    if shape.intermediate % _SPAN or _SPAN % cluster:
        return f"{cluster} blocks do not share {shape.intermediate} inner values in {_SPAN}s"
    if group + 2 > tiling.threads // _WARP:
        return f"{group} query heads of a KV head"
    attention = _attention_bytes(shape, tiling) + _heads_bytes(shape, tiling) + _RESERVED_BYTES
    if attention > _SHARED_BYTES:
        return f"a block's part of the attention takes {attention} bytes of {_SHARED_BYTES}"
    tiles, shared = _gate_up_tiles(shape, tiling), _shared_tiles(shape, tiling)
    if tiles - shared > _MOST_HELD:
        return f"a block's part of the MLP has {tiles} tiles of rows, {shared} fit"
    return ""


class _Cache(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int),
    )


def _cache(k: torch.Tensor, v: torch.Tensor) -> _Cache:
    if not k.dtype == v.dtype == torch.bfloat16:
        raise TypeError(f"the cache is {k.dtype} and {v.dtype}, these kernels read bfloat16 alone")
    block, token, head, _ = k.stride()
    return _Cache(k.data_ptr(), v.data_ptr(), block, token, head, k.shape[1])


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual between two blocks."""

    residual: torch.Tensor  # [1, N] bfloat16
    partials: torch.Tensor  # [P, N] float32
    num_partials: int


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """The place of the token: the inputs of its attention."""

    position: torch.Tensor  # [1] int64
    slot: torch.Tensor  # [1] int64; negative: its keys and values are not stored
    block_table: torch.Tensor  # [1, W] int32
    length: torch.Tensor  # [1] int32, this token included; 0: padding


class DecodeLayer:
    """The kernels of one shape, for every layer of a model."""

    def __init__(
        self,
        shape: LayerShape,
        tiling: LayerTiling,
        eps: float,
        scale: float,
        kept: Path | None = None,
    ) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        assert not why_unsuitable(shape, tiling)
        self.shape = shape
        self.tiling = tiling
        self._eps = eps
        self._scale_log2 = scale * 1.4426950408889634
        sizes = (_attention_bytes(shape, tiling), _mlp_bytes(shape, tiling))
        both = sum(sizes) + _heads_bytes(shape, tiling)
        program = Program(SOURCE, _defines(shape, tiling, both), kept)
        cluster, threads = tiling.cluster, tiling.threads
        self.attention_kernel = program.kernel(
            "attention_block", Launch(shape.num_kv_heads * cluster, cluster, threads, sizes[0])
        )
        self.mlp_kernel = program.kernel(
            "mlp_block", Launch(tiling.mlp_clusters * cluster, cluster, threads, sizes[1])
        )
        self._final = program.kernel("final_norm", Launch(1, 1, threads, 0))

    def overlaps(self) -> bool:
        """True if the device holds both launches at once, so that weights come ahead of time."""
        most = self.mlp_kernel.most_active_clusters()
        return most >= self.shape.num_kv_heads + self.tiling.mlp_clusters

    def attend(
        self,
        before: ResidualStream,
        residual: torch.Tensor,
        partials: torch.Tensor,
        norm: torch.Tensor,
        qkv: torch.Tensor,
        qk_norms: tuple[torch.Tensor, torch.Tensor] | None,
        o: torch.Tensor,
        cos_sin: torch.Tensor,
        row: DecodedRow,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> ResidualStream:
        """The attention block; fills `residual` and `partials`, and the token's cache slot."""
        q_norm, k_norm = qk_norms or (norm, norm)  # not read where the model has none
        self.attention_kernel(
            qkv, o, norm, q_norm, k_norm, before.residual, residual, before.partials,
            before.num_partials, partials, cos_sin, row.position, row.slot, row.block_table,
            row.length, _cache(*kv), self._eps, self._scale_log2,
        )  # fmt: skip
        return ResidualStream(residual, partials, self.shape.num_kv_heads)

    def feed_forward(
        self,
        before: ResidualStream,
        residual: torch.Tensor,
        partials: torch.Tensor,
        norm: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> ResidualStream:
        """The MLP block; fills `residual` and `partials`."""
        self.mlp_kernel(
            gate_up, down, norm, before.residual, residual, before.partials,
            before.num_partials, partials, self._eps,
        )  # fmt: skip
        return ResidualStream(residual, partials, self.tiling.mlp_clusters)

    def normed(self, before: ResidualStream, norm: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The residual with its partials, normed, into `out` [1, N]."""
        self._final(norm, before.residual, before.partials, before.num_partials, out, self._eps)
        return out


def _defines(shape: LayerShape, tiling: LayerTiling, shared_bytes: int) -> dict[str, int]:
    fit_two = shared_bytes + 4 * _RESERVED_BYTES <= _SHARED_BYTES
    return {
        "HIDDEN": shape.hidden,
        "HEAD_DIM": shape.head_dim,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "KV_HEADS": shape.num_kv_heads,
        "INTERMEDIATE": shape.intermediate,
        "MLP_CLUSTERS": tiling.mlp_clusters,
        "SHARED_TILES": _shared_tiles(shape, tiling),
        "CLUSTER": tiling.cluster,
        "THREADS": tiling.threads,
        "QK_NORM": int(shape.has_qk_norm),
        "SCRATCH_BYTES": _scratch_bytes(shape, tiling),
        "MIN_BLOCKS": 2 if fit_two else 1,  # so that two launches share a multiprocessor
    }


def _tiles(rows: int) -> int:
    return -(-rows // _TILE)


def _row_bytes(shape: LayerShape) -> int:
    """Bytes of a weight's row in shared memory."""
    return 2 * (shape.hidden + 32)


def _scratch_bytes(shape: LayerShape, tiling: LayerTiling) -> int:
    """Bytes of the attention block: its weights, then what its warps attended to."""
    group = shape.num_heads // shape.num_kv_heads
    rows = _tiles((group + 2) * shape.head_dim // tiling.cluster) * _TILE
    warps = tiling.threads // _WARP
    return max(rows * _row_bytes(shape), warps * group * (shape.head_dim + 2) * 4)


def _left_bytes(num_tiles: int, groups: int, shape: LayerShape, tiling: LayerTiling) -> int:
    """Bytes of sums that warps leave for each other: of the first projection, then the second."""
    warps, out_tiles = tiling.threads // _WARP, _tiles(shape.hidden // tiling.cluster)
    out_groups = 1 if warps % out_tiles else out_tiles
    return 4 * _TILE * max(warps // groups * num_tiles, warps // out_groups * out_tiles)


def _attention_bytes(shape: LayerShape, tiling: LayerTiling) -> int:
    group = shape.num_heads // shape.num_kv_heads
    tiles = _tiles((group + 2) * shape.head_dim // tiling.cluster)
    left = _left_bytes(tiles, 1 if tiles % 2 else 2, shape, tiling)
    return _scratch_bytes(shape, tiling) + 2 * _row_bytes(shape) + left


def _heads_bytes(shape: LayerShape, tiling: LayerTiling) -> int:
    """Bytes of the attention block's fixed memory, about."""
    group = shape.num_heads // shape.num_kv_heads
    floats = (group + 5) * shape.head_dim + tiling.cluster * group * (shape.head_dim + 2) + 32
    return 4 * floats + 2 * (group + 2) * shape.head_dim


def _gate_up_tiles(shape: LayerShape, tiling: LayerTiling) -> int:
    """Tiles of a block of the MLP, gate and up rows."""
    spans = -(-shape.intermediate // _SPAN // tiling.mlp_clusters)
    return _tiles(2 * spans * _SPAN // tiling.cluster)


def _shared_tiles(shape: LayerShape, tiling: LayerTiling) -> int:
    """Tiles that shared memory holds; registers hold the rest."""
    tiles = _gate_up_tiles(shape, tiling)
    rest = _SHARED_BYTES - _MLP_BYTES - 2 * _row_bytes(shape)
    rest -= _left_bytes(tiles, 1, shape, tiling)
    return min(tiles, rest // (_TILE * _row_bytes(shape)))


def _mlp_bytes(shape: LayerShape, tiling: LayerTiling) -> int:
    tiles = _shared_tiles(shape, tiling)
    left = _left_bytes(_gate_up_tiles(shape, tiling), 1, shape, tiling)
    return (tiles * _TILE + 2) * _row_bytes(shape) + left
