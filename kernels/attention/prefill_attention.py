# mypy: disable-error-code="untyped-decorator"
"""Prefill attention: many query tokens per sequence, causal, over the paged KV cache.

    q [T, H, D], k_cache and v_cache [num_blocks, block_size, Hkv, D], block_tables [B, W],
    context_lens [B], cu_seqlens_q [B+1]  ->  out [T, H, D]

The keys of a sequence are its cached context and its new tokens, already written to the cache; the
last query sees the last key. Whole prompts, chunks and single decode tokens may share a batch.
One program handles a tile of queries of one sequence; tiles are numbered without gaps over the
batch, so one long prompt among many short ones launches no idle programs. A captured CUDA graph
must not depend on lengths: `attend_tiles` takes a table of tiles in their place, of a fixed size,
whose programs without a tile leave at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.decode_attention import capped
from kernels.attention.paged import Tiles, check_heads, check_sinks, output_for
from kernels.attention_kind import AttentionKind
from kernels.pdl import has_pdl, is_compiled, launch_options

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Config:
    block_m: int  # rows of a tile: query tokens times the heads packed together
    block_n: int
    pack_heads: bool  # whether all query heads of a KV head share a tile
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def heads(self, group: int) -> int:
        """Query heads of a tile."""
        return group if self.pack_heads else 1

    def tokens(self, group: int) -> int:
        """Query tokens of a tile."""
        padded: int = triton.next_power_of_2(self.heads(group))
        return self.block_m // padded


def _config(max_seqlen_q: int, group: int, head_dim: int, itemsize: int) -> _Config:
    padded_group = triton.next_power_of_2(group)
    rows = triton.next_power_of_2(max_seqlen_q) * padded_group
    if itemsize == 4:
        return _Config(32, 32, pack_heads=False, num_warps=4, num_stages=2)
    if rows <= 64:
        return _Config(max(16, rows), 64, pack_heads=True, num_warps=4, num_stages=3)
    if head_dim > 128:
        return _Config(64, 64, pack_heads=False, num_warps=4, num_stages=2)
    # Half the registers of a processor each: two tiles share it, one exponentiates while the other
    # multiplies. That is worth more than the few spilled words it costs.
    packs = group == padded_group
    return _Config(128, 64, pack_heads=packs, num_warps=8, num_stages=2, max_registers=128)


def _tiled_config(max_seqlen_q: int, group: int, head_dim: int, itemsize: int) -> _Config:
    """The configuration of steps of up to a few thousand tokens, whose tiles are few.

    Measured on H200 with head size 128 and two heads to a group: one prompt of 512, 1,024 and 2,048
    tokens takes 13, 23 and 47 us by tiles of 64 rows, 17, 35 and 69 us by those of 128.
    """
    config = _config(max_seqlen_q, group, head_dim, itemsize)
    if config.num_warps < 8:
        return config
    rows = max(64, triton.next_power_of_2(config.heads(group)))
    return _Config(rows, 64, config.pack_heads, num_warps=4, num_stages=3)


def tokens_per_tile(max_seqlen_q: int, heads: tuple[int, int], head_dim: int, itemsize: int) -> int:
    """Query tokens of a tile in `attend_tiles`; heads are query heads and KV heads."""
    group = heads[0] // heads[1]
    return _tiled_config(max_seqlen_q, group, head_dim, itemsize).tokens(group)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    kind: AttentionKind,
    out: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from tokens `cu_seqlens_q[b]` up to `cu_seqlens_q[b+1]` to sequence b's keys.

    A sequence of context 0 gives zeros. A cache in FP8 comes with its scales.
    """
    batch = context_lens.shape[0]
    if block_tables.shape[0] != batch or cu_seqlens_q.shape != (batch + 1,):
        raise ValueError(f"batch {batch}: {block_tables.shape=}, {cu_seqlens_q.shape=}")
    return _attend_all(
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, max_seqlen_q, kind, out,
        kv_scales=kv_scales, sinks=sinks,
    )  # fmt: skip


def attend_tiles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    tiles: Tiles,
    kind: AttentionKind,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`paged_attention` of the queries of these tiles alone; writes no other row of `out`."""
    if tiles.rows.shape != tiles.firsts.shape:
        raise ValueError(f"{tiles.rows.shape=}, {tiles.firsts.shape=}")
    if not tiles.rows.dtype == tiles.firsts.dtype == torch.int32:
        raise TypeError("tiles must be int32")
    _attend_all(
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, tiles.max_seqlen_q, kind,
        out, tiles, kv_scales, sinks,
    )  # fmt: skip


def _attend_all(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    kind: AttentionKind,
    out: torch.Tensor | None,
    tiles: Tiles | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    check_heads(q, k_cache, v_cache, kv_scales)
    check_sinks(kind, sinks, num_heads)
    if not block_tables.dtype == context_lens.dtype == cu_seqlens_q.dtype == torch.int32:
        raise TypeError("block_tables, context_lens and cu_seqlens_q must be int32")
    if not block_tables.stride(1) == context_lens.stride(0) == cu_seqlens_q.stride(0) == 1:
        raise ValueError("block_tables, context_lens and cu_seqlens_q must be contiguous")

    out = output_for(q, out)
    if num_tokens == 0:
        return out
    batch, group = context_lens.shape[0], num_heads // num_kv_heads
    configure = _config if tiles is None else _tiled_config
    config = configure(max_seqlen_q, group, head_dim, q.element_size())
    heads_per_tile, tokens_per_tile = config.heads(group), config.tokens(group)
    # A bound that needs no look at the lengths: each sequence wastes less than one tile.
    num_tiles = num_tokens // tokens_per_tile + batch if tiles is None else len(tiles.rows)
    registers = {}
    if config.max_registers and is_compiled(q):
        registers["maxnreg"] = config.max_registers
    _prefill_kernel[(num_heads // heads_per_tile, num_tiles)](
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, out,
        None if tiles is None else tiles.rows,
        None if tiles is None else tiles.firsts,
        kv_scales,
        sinks,
        batch,
        kind.scale * _LOG2_E,
        (kind.softcap or 0.0) * _LOG2_E,
        q.stride(0), *k_cache.stride()[:3], block_tables.stride(0), num_heads * head_dim,
        GROUP=group,
        HEADS=heads_per_tile,
        TOKENS=tokens_per_tile,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HAS_TILES=tiles is not None,
        IS_FP8=kv_scales is not None,
        WINDOW=kind.window or 0,
        HAS_CAP=kind.softcap is not None,
        HAS_SINKS=sinks is not None,
        WIDE=k_cache.stride(0) * num_blocks >= 2**31,
        PDL=has_pdl(q),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **registers,
        **launch_options(q),
    )  # fmt: skip
    return out


@triton.jit
def find_sequence(
    cu_ptr: tl.tensor, batch: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The sequence of a tile. Sequence i owns the tiles from cu[i] // TOKENS + i on."""
    CHUNK: tl.constexpr = 256
    found = 0
    for first in range(0, batch, CHUNK):
        i = first + tl.arange(0, CHUNK)
        starts = tl.load(cu_ptr + i, mask=i < batch, other=0) // TOKENS + i
        found += tl.sum(((starts <= tile) & (i < batch)).to(tl.int32), 0)
    return found - 1


@triton.jit
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    q: tl.tensor,
    positions: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tuple:
    """Fold keys [start, end) into the running softmax; unmasked, all rows see all of them."""
    dims = tl.arange(0, D)
    tokens = start + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    for _ in range(start, end, BLOCK_N):
        # Offsets in 32 bits where the cache allows: address arithmetic is a tenth of this loop.
        if WIDE:
            blocks = blocks.to(tl.int64)
        offsets = blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token
        kv_offsets = offsets[:, None] + dims[None, :]
        if MASKED:
            k = tl.load(k_ptr + kv_offsets, mask=(tokens < end)[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + kv_offsets)  # [BLOCK_N, D]
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            scores = capped(scores * scale_log2, cap_log2) / scale_log2
        if MASKED:
            scores = tl.where(positions[:, None] >= tokens[None, :], scores, float("-inf"))
        if WINDOW > 0:
            is_near = positions[:, None] - tokens[None, :] < WINDOW
            scores = tl.where(is_near, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        base = new_peak
        if WINDOW > 0:  # a row may have seen no key yet, and infinities have no difference
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.exp2(peak - base)
        if MASKED:
            v = tl.load(v_ptr + kv_offsets, mask=(tokens < end)[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + kv_offsets)
        v = v.to(q.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        # The next block ids are asked for a whole tile before their addresses are needed.
        tokens += BLOCK_N
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    return acc, total, peak


# How many sequences share a step changes all the time; it must not compile a kernel anew.
@triton.jit(do_not_specialize=["batch"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    cu_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_rows_ptr: tl.tensor,
    tile_firsts_ptr: tl.tensor,
    kv_scales_ptr: tl.tensor,  # [4, KV heads] where IS_FP8
    sinks_ptr: tl.tensor,  # [heads] where HAS_SINKS
    batch: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,  # where HAS_CAP
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    stride_out: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TILES: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    first_head = tl.program_id(0) * HEADS
    # Late tiles see the most keys: start them first, so that the short ones fill the tail.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_TILES:
        tile = tl.program_id(1)
        tile_row = tl.load(tile_rows_ptr + tile)
        seq = tl.maximum(tile_row, 0)
    else:
        seq = find_sequence(cu_ptr, batch, tile, TOKENS)
    seq_start = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - seq_start
    context_len = tl.load(lens_ptr + seq)
    if HAS_TILES:
        first_token = tl.where(tile_row < 0, q_len, tl.load(tile_firsts_ptr + tile))
    else:
        first_token = (tile - (seq_start // TOKENS + seq)) * TOKENS
    if first_token >= q_len:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    tokens = first_token + rows % TOKENS
    heads = rows // TOKENS
    valid = (tokens < q_len) & (heads < HEADS)
    positions = context_len - q_len + tokens  # [BLOCK_M]
    token_ids = (seq_start + tokens).to(tl.int64)
    head_offsets = (first_head + heads) * D
    q_offsets = (token_ids * stride_q + head_offsets)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=valid[:, None], other=0.0)  # [BLOCK_M, D]

    kv_head = (first_head // GROUP).to(tl.int64) * stride_head
    if IS_FP8:  # the values' scale is applied to their sum
        scale_log2 *= tl.load(kv_scales_ptr + first_head // GROUP)
    table = tables_ptr + seq.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:  # as a key whose value is zero
        sinks = tl.load(sinks_ptr + first_head + heads, mask=heads < HEADS, other=0.0)
        peak = sinks.to(tl.float32) * 1.4426950408889634
        total += 1.0
    first_position = context_len - q_len + first_token
    end = tl.minimum(first_position + TOKENS, context_len)
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    start = 0
    if WINDOW > 0:
        # Not a block earlier: a table may name pages of other sequences before a window.
        start = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
        seen_by_all = start + (first_position + 1 - start) // BLOCK_N * BLOCK_N
    acc, total, peak = _attend(
        acc, total, peak, q, positions, k_ptr + kv_head, v_ptr + kv_head, table, start, seen_by_all,
        scale_log2, cap_log2, stride_block, stride_token, D, BLOCK_SIZE, BLOCK_N, False, WINDOW,
        HAS_CAP, WIDE,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, positions, k_ptr + kv_head, v_ptr + kv_head, table, seen_by_all, end,
        scale_log2, cap_log2, stride_block, stride_token, D, BLOCK_SIZE, BLOCK_N, True, WINDOW,
        HAS_CAP, WIDE,
    )  # fmt: skip
    out_offsets = (token_ids * stride_out + head_offsets)[:, None] + dims[None, :]
    if IS_FP8:
        num_kv_heads = tl.num_programs(0) * HEADS // GROUP
        acc *= tl.load(kv_scales_ptr + num_kv_heads + first_head // GROUP)
    # A sequence of no context is padding: it attended to nothing and gets zeros.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=valid[:, None])
