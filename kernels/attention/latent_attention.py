# mypy: disable-error-code="untyped-decorator"
"""Attention over latents: one row of the cache a token is the key of all heads, and their value.

    q [T, H, R + P], cache [num_blocks, block_size, 1, R + P], block_tables [B, W], context_lens [B]
      ->  out [T, H, R]

A row is a latent [R] and a rotated key [P]; the value is the latent. A program multiplies a tile of
queries, of any heads and one sequence, with rows that it loads once for both products: it takes
pairs of a token and a head in the order in which they lie, so no number of heads leaves a tile
half empty. Heads beyond the first tile find the rows in L2.

Decodes are cut into slices of the context ("splits"), which a second kernel merges. All grids
depend on shapes alone, never on lengths, so a captured CUDA graph stays valid. Tiles are chosen by
what compiles for sm_90 with the fewest spills; nothing here was measured.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import find_sequence, tokens_per_tile
from kernels.attention_kind import AttentionKind
from kernels.pdl import has_pdl, launch_options

_LOG2_E = 1.4426950408889634
_PROGRAMS = 256  # of a decode, about two for each multiprocessor
_MAX_SPLITS = 64
_MIN_SPLIT = 64  # tokens: a shorter context is not cut further
_MERGED = 8  # splits that a merge looks at at once
_TOKENS = 16  # query tokens of a sequence's part of a grid, of which each head has one row


@dataclass(frozen=True, slots=True)
class _Rows:
    """The sizes of a cache's rows, and the tile that suits a number of heads."""

    latent: int
    turned: int
    block_m: int
    block_n: int
    num_warps: int

    @classmethod
    def of(cls, q: torch.Tensor, v_dim: int, pairs: int) -> "_Rows":
        """Tiles of queries [T, H, R + P], of a sequence with so many pairs of token and head."""
        itemsize = q.element_size()
        block_m = max(16, min(64 if itemsize == 2 else 16, triton.next_power_of_2(pairs)))
        block_n = 32 if itemsize == 2 else 16
        return cls(v_dim, q.shape[2] - v_dim, block_m, block_n, 8 if block_m > 16 else 4)

    @property
    def constants(self) -> dict[str, int]:
        """The constants of a kernel."""
        return {
            "R": self.latent,
            "P": self.turned,
            "BLOCK_R": max(16, triton.next_power_of_2(self.latent)),
            "BLOCK_P": max(16, triton.next_power_of_2(self.turned)),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": 2,
        }


def latent_decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    v_dim: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kind: AttentionKind,
    out: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with one query a sequence, q [B, H, R + P]; a row of length 0 gives zeros.

    With `num_rows` [1] int32 these rows alone are computed, and splits are shared out among them;
    q and `out` may have more rows than there are lengths.
    """
    batch, num_heads = len(context_lens), q.shape[1]
    out = _output(q, cache, v_dim, kind, out)
    _check_tables(block_tables, context_lens)
    if len(block_tables) != batch or (num_rows is None and len(q) != batch):
        raise ValueError(f"{len(q)} queries, {batch} lengths, {len(block_tables)} tables")
    if batch == 0 or len(q) == 0:
        return out
    rows = _Rows.of(q, v_dim, num_heads)
    head_tiles = triton.cdiv(num_heads, rows.block_m)
    most = max(batch, _PROGRAMS // head_tiles)  # of slices: a row has one at least
    num_splits = 0 if num_rows is not None else _splits(batch, most)
    grid = (head_tiles, batch, num_splits) if num_splits else (head_tiles, most, 1)
    slices = 0 if num_splits == 1 else most
    partial = q.new_empty((slices, num_heads, v_dim), dtype=torch.float32)
    stats = q.new_empty((slices, num_heads), dtype=torch.float32)
    splitting = dict(
        H=num_heads,
        R=v_dim,
        BLOCK_N=rows.block_n,
        NUM_SPLITS=num_splits,
        MAX_SPLITS=_MAX_SPLITS,
        MIN_SPLIT=_MIN_SPLIT,
        PDL=has_pdl(q),
        **launch_options(q),
    )
    _decode_kernel[grid](
        q, cache, block_tables, context_lens, num_rows, out, partial, stats,
        kind.scale * _LOG2_E, *cache.stride()[:2], block_tables.stride(0),
        BLOCK_SIZE=cache.shape[1],
        **rows.constants | splitting,
    )  # fmt: skip
    if num_splits != 1:
        _merge_kernel[(num_heads, batch)](
            context_lens, num_rows, partial, stats, out,
            most,
            BLOCK_R=triton.next_power_of_2(v_dim),
            MERGED=_MERGED,
            num_warps=4,
            **splitting,
        )  # fmt: skip
    return out


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    v_dim: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    kind: AttentionKind,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends from tokens `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]` to sequence b's rows.

    A sequence's last query sees its last row. A sequence of context 0 gives zeros.
    """
    out = _output(q, cache, v_dim, kind, out)
    tokens = min(_TOKENS, triton.next_power_of_2(max_seqlen_q))
    # A bound that needs no look at the lengths: each sequence wastes less than one part.
    num_parts = len(q) // tokens + len(context_lens)
    _attend_parts(
        q, cache, v_dim, block_tables, context_lens, cu_seqlens_q, kind, out, tokens, num_parts
    )
    return out


def attend_latent_tiles(
    q: torch.Tensor,
    cache: torch.Tensor,
    v_dim: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    tiles: Tiles,
    kind: AttentionKind,
    out: torch.Tensor,
) -> None:
    """`latent_attention` of the queries of these tiles alone; writes no other row of `out`."""
    if tiles.rows.shape != tiles.firsts.shape:
        raise ValueError(f"{tiles.rows.shape=}, {tiles.firsts.shape=}")
    if not tiles.rows.dtype == tiles.firsts.dtype == torch.int32:
        raise TypeError("tiles must be int32")
    heads = q.shape[1], 1
    tokens = tokens_per_tile(tiles.max_seqlen_q, heads, q.shape[2], q.element_size())
    _attend_parts(
        q, cache, v_dim, block_tables, context_lens, cu_seqlens_q, kind,
        _output(q, cache, v_dim, kind, out), tokens, len(tiles.rows), tiles,
    )  # fmt: skip


def _attend_parts(
    q: torch.Tensor,
    cache: torch.Tensor,
    v_dim: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: AttentionKind,
    out: torch.Tensor,
    tokens: int,
    num_parts: int,
    tiles: Tiles | None = None,
) -> None:
    batch = len(context_lens)
    _check_tables(block_tables, context_lens, cu_seqlens_q)
    if len(block_tables) != batch or cu_seqlens_q.shape != (batch + 1,):
        raise ValueError(f"batch {batch}: {block_tables.shape=}, {cu_seqlens_q.shape=}")
    if len(q) == 0:
        return
    pairs = tokens * q.shape[1]
    rows = _Rows.of(q, v_dim, pairs)
    _prefill_kernel[(triton.cdiv(pairs, rows.block_m), num_parts)](
        q, cache, block_tables, context_lens, cu_seqlens_q, out,
        None if tiles is None else tiles.rows,
        None if tiles is None else tiles.firsts,
        batch, kind.scale * _LOG2_E, *cache.stride()[:2], block_tables.stride(0),
        H=q.shape[1],
        TOKENS=tokens,
        BLOCK_SIZE=cache.shape[1],
        HAS_TILES=tiles is not None,
        PDL=has_pdl(q),
        **rows.constants,
        **launch_options(q),
    )  # fmt: skip


def _splits(batch: int, most: int) -> int:
    """The splits of each of so many rows: a power of two, which fewer kernels serve."""
    share = max(1, min(_MAX_SPLITS, most // batch))
    return 1 << (share.bit_length() - 1)


def _output(
    q: torch.Tensor, cache: torch.Tensor, v_dim: int, kind: AttentionKind, out: torch.Tensor | None
) -> torch.Tensor:
    """The tensor of the result. Raises ValueError or TypeError for what kernels do not serve."""
    if not kind.is_plain:
        raise ValueError(f"{kind} is not served over latents")
    if q.shape[2] != cache.shape[3] or cache.shape[2] != 1 or not 0 < v_dim < q.shape[2]:
        raise ValueError(f"queries {tuple(q.shape)}, cache {tuple(cache.shape)}, values of {v_dim}")
    if not q.is_contiguous() or cache.stride(3) != 1:
        raise ValueError("queries and rows of the cache must be contiguous")
    if q.dtype != cache.dtype:
        raise TypeError(f"q is {q.dtype}, the cache {cache.dtype}")
    shape = *q.shape[:2], v_dim
    out = q.new_empty(shape) if out is None else out
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape} of {q.dtype}")
    return out


def _check_tables(*tables: torch.Tensor) -> None:
    for table in tables:
        if table.dtype != torch.int32 or table.stride(-1) != 1:
            raise TypeError("tables and lengths must be int32, their rows contiguous")


@triton.jit
def _fold(
    acc: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    q: tl.tensor,
    q_turned: tl.tensor,
    last_seen: tl.tensor,
    cache_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tuple:
    """Folds rows [start, end) into the running softmax; each query sees one of them at least."""
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < end
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        rows = cache_ptr + blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token
        is_r = valid[:, None] & (r < R)[None, :]
        latent = tl.load(rows[:, None] + r[None, :], mask=is_r, other=0.0)  # [BLOCK_N, BLOCK_R]
        is_p = valid[:, None] & (p < P)[None, :]
        turned = tl.load(rows[:, None] + R + p[None, :], mask=is_p, other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee") * scale_log2
        is_seen = (tokens[None, :] <= last_seen[:, None]) & valid[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    return acc, total, peak


@triton.jit
def _num_splits(
    num_rows_ptr: tl.tensor,
    most: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> tl.tensor:
    """The splits of each row: as many as are given, or as the device's number of rows leaves."""
    if NUM_SPLITS > 0:
        return NUM_SPLITS
    else:  # noqa: RET505 - one of the two is compiled
        return tl.minimum(most // tl.maximum(tl.load(num_rows_ptr), 1), MAX_SPLITS)


@triton.jit
def _per_split(
    context_len: tl.tensor, num_splits: tl.tensor, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The tokens of a row's splits, of which the last ones may be empty."""
    return tl.cdiv(tl.maximum(tl.cdiv(context_len, num_splits), MIN_SPLIT), BLOCK_N) * BLOCK_N


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,  # where NUM_SPLITS is 0
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [slices, H, R] where NUM_SPLITS is not 1
    stats_ptr: tl.tensor,  # [slices, H]: the logarithm of the sum of exponentials
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some heads of one row over one split of its context."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_splits = _num_splits(num_rows_ptr, tl.num_programs(1), NUM_SPLITS, MAX_SPLITS)
    if NUM_SPLITS > 0:
        seq, split = tl.program_id(1), tl.program_id(2)
    else:  # all first splits come first
        num_rows = tl.maximum(tl.load(num_rows_ptr), 1)
        seq, split = tl.program_id(1) % num_rows, tl.program_id(1) // num_rows
    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    is_head = heads < H
    is_r = is_head[:, None] & (r < R)[None, :]
    row = seq.to(tl.int64) * H + heads
    context_len = tl.load(lens_ptr + seq)
    per_split = _per_split(context_len, num_splits, MIN_SPLIT, BLOCK_N)
    start = split * per_split
    end = tl.minimum(start + per_split, context_len)
    if (start >= end) | (split >= num_splits):
        if (context_len == 0) & (split == 0):
            zeros = tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row[:, None] * R + r[None, :], zeros, mask=is_r)
        return
    q_rows = q_ptr + row[:, None] * (R + P)
    is_p = is_head[:, None] & (p < P)[None, :]
    q = tl.load(q_rows + r[None, :], mask=is_r, other=0.0)
    q_turned = tl.load(q_rows + R + p[None, :], mask=is_p, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    last_seen = tl.zeros([BLOCK_M], tl.int32) + end
    acc, total, peak = _fold(
        acc, total, peak, q, q_turned, last_seen, cache_ptr,
        tables_ptr + seq.to(tl.int64) * stride_table, start, end, scale_log2, stride_block,
        stride_token, R, P, BLOCK_R, BLOCK_P, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc = acc / total[:, None]
    is_whole = True if NUM_SPLITS == 1 else per_split >= context_len
    if is_whole:
        result = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * R + r[None, :], result, mask=is_r)
    else:
        at = (seq.to(tl.int64) * num_splits + split) * H + heads
        tl.store(partial_ptr + at[:, None] * R + r[None, :], acc, mask=is_r)
        tl.store(stats_ptr + at, peak + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["most"])
def _merge_kernel(
    lens_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,  # where NUM_SPLITS is 0
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    most: tl.tensor,  # slices
    H: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One head of one row, out of the splits of its context; nothing if there is one split."""
    head, seq = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if NUM_SPLITS == 0:  # noqa: SIM102 - the second is known on the device alone
        if seq >= tl.load(num_rows_ptr):
            return
    num_splits = _num_splits(num_rows_ptr, most, NUM_SPLITS, MAX_SPLITS)
    context_len = tl.load(lens_ptr + seq)
    per_split = _per_split(context_len, num_splits, MIN_SPLIT, BLOCK_N)
    if per_split >= context_len:
        return
    num_active = tl.cdiv(context_len, per_split)
    top = float("-inf")
    total = 0.0
    merged = tl.zeros([BLOCK_R], tl.float32)
    for first in range(0, num_active, MERGED):
        splits = first + tl.arange(0, MERGED)
        active = splits < num_active
        at = (seq.to(tl.int64) * num_splits + splits) * H + head
        logs = tl.load(stats_ptr + at, mask=active, other=float("-inf"))
        inside = active[:, None] & (r < R)[None, :]
        parts = tl.load(partial_ptr + at[:, None] * R + r[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        shares = tl.exp2(logs - new_top)
        shrink = tl.exp2(top - new_top)
        merged = merged * shrink + tl.sum(parts * shares[:, None], 0)
        total = total * shrink + tl.sum(shares, 0)
        top = new_top
    to = out_ptr + (seq.to(tl.int64) * H + head) * R + r
    tl.store(to, (merged / total).to(out_ptr.dtype.element_ty), mask=r < R)


# How many sequences share a step changes all the time; it must not compile a kernel anew.
@triton.jit(do_not_specialize=["batch"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    cu_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_rows_ptr: tl.tensor,
    tile_firsts_ptr: tl.tensor,
    batch: tl.tensor,
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,  # of a part
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_TILES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Consecutive pairs of token and head of one sequence."""
    # Late parts see the most rows: start them first, so that the short ones fill the tail.
    part = tl.num_programs(1) - 1 - tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_TILES:
        part = tl.program_id(1)
        tile_row = tl.load(tile_rows_ptr + part)
        seq = tl.maximum(tile_row, 0)
    else:
        seq = find_sequence(cu_ptr, batch, part, TOKENS)
    seq_start = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - seq_start
    context_len = tl.load(lens_ptr + seq)
    if HAS_TILES:
        first_token = tl.where(tile_row < 0, q_len, tl.load(tile_firsts_ptr + part))
    else:
        first_token = (part - (seq_start // TOKENS + seq)) * TOKENS
    end_pair = tl.minimum(first_token + TOKENS, q_len) * H
    first_pair = first_token * H + tl.program_id(0) * BLOCK_M
    if first_pair >= end_pair:
        return

    pairs = first_pair + tl.arange(0, BLOCK_M)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    valid = pairs < end_pair
    row = seq_start.to(tl.int64) * H + pairs
    is_r = valid[:, None] & (r < R)[None, :]
    is_p = valid[:, None] & (p < P)[None, :]
    q_rows = q_ptr + row[:, None] * (R + P)
    q = tl.load(q_rows + r[None, :], mask=is_r, other=0.0)
    q_turned = tl.load(q_rows + R + p[None, :], mask=is_p, other=0.0)
    positions = context_len - q_len + pairs // H
    last_pair = tl.minimum(first_pair + BLOCK_M, end_pair) - 1
    end = tl.minimum(context_len - q_len + last_pair // H + 1, context_len)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, total, peak = _fold(
        acc, total, peak, q, q_turned, positions, cache_ptr,
        tables_ptr + seq.to(tl.int64) * stride_table, 0, end, scale_log2, stride_block,
        stride_token, R, P, BLOCK_R, BLOCK_P, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    # A sequence of no context is padding: it attended to nothing and gets zeros.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + row[:, None] * R + r[None, :], result.to(out_ptr.dtype.element_ty), mask=is_r
    )
