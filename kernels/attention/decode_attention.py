# mypy: disable-error-code="untyped-decorator"
"""Decode attention: one query token per sequence over its paged KV cache.

    q [B, H, D], k_cache and v_cache [num_blocks, block_size, Hkv, D], block_tables [B, W],
    context_lens [B]  ->  out [B, H, D]

One program reads one slice ("split") of one KV head of one sequence for all query heads that share
it, so every cached byte is read once. The last split to finish merges the partial results of its
sequence, hence one launch; where few programs would merge for long, one after the other, a second
kernel merges with a program for each head. The grid depends on shapes alone, never on lengths, so a
captured CUDA graph stays valid while contexts grow. `attend_leading` has the number of rows from
the device, too: its programs share themselves out among however many there are.

Of the rule in `pdl`, that nothing but weights is read before the wait, this kernel takes lengths,
tables and older keys and values as an exception, since they are older than the step's embedding,
an ordinary kernel that nothing overtakes. The newest token's may be fetched too early, but into L2
only, where its writer then changes it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.paged import check_heads, check_sinks, output_for
from kernels.attention.workspace import MAX_SLICES, DecodeWorkspace, decode_workspace
from kernels.attention_kind import AttentionKind
from kernels.pdl import has_pdl, launch_options

_LOG2_E = 1.4426950408889634
_FEW_PAIRS = 32
_MANY_PAIRS = 1536
_LINE_BYTES = 128  # what one prefetch brings
_FEW_TO_PREFETCH = 256  # pairs; more of them keep the memory busy by themselves
_MAX_MERGED = 16  # splits that a merge looks at at once
# Of rows that the device counts: what suits a few dozen of them.
_LEADING_PROGRAMS, _MAX_LEADING_SPLITS, _LEADING_MIN_SPLIT = 1024, 32, 64


@dataclass(frozen=True, slots=True)
class _Config:
    num_splits: int  # 0: as many as the device's count of rows leaves programs for
    min_split: int  # tokens: a shorter context is not cut further
    block_n: int
    num_warps: int
    num_stages: int
    tokens_first: bool = False  # scores are [tokens, heads], of which a matrix unit wants 8
    merges_apart: bool = False  # in a second kernel


def _config(pairs: int, group: int, head_dim: int, itemsize: int) -> _Config:
    """Measured on H200 with head size 128; `pairs` are (sequence, KV head) pairs.

    Contexts were those of a real run, 100 to 2,000 tokens, longest first.
    """
    if head_dim * itemsize > 256:
        # Three stages of tiles of 16 KiB are in shared memory; of larger heads they might not be.
        has_room = head_dim * itemsize <= 512
        if has_room and 2 * pairs <= _FEW_PAIRS:
            return _Config(64, 32, 32, num_warps=4, num_stages=2, merges_apart=True)
        if has_room and _FEW_PAIRS < pairs <= 128:
            splits, least = (8, 64) if pairs <= 96 else (4, 128)
            return _Config(splits, least, 32, num_warps=4, num_stages=3)
        splits, apart = _round_down(max(1, min(64, 1024 // pairs))), pairs <= _FEW_PAIRS
        return _Config(splits, 32, 16, num_warps=2, num_stages=2, merges_apart=apart)
    if pairs <= 2 * _FEW_PAIRS and group <= 2:
        # At contexts of about 600 half as many would do, 2 % better; long ones need these.
        return _Config(min(64, _round_down(1024 // pairs)), 32, 32, 1, 2, tokens_first=True)
    if pairs <= _FEW_PAIRS:
        return _Config(64, 64, 64, num_warps=2, num_stages=2, merges_apart=True)
    if pairs <= 256:
        return _Config(_round_down(1024 // pairs), 32, 32, num_warps=1, num_stages=3)
    if pairs < 512:
        return _Config(4, 128, 64, num_warps=2, num_stages=2)
    # Enough sequences to fill the chip: only long contexts are cut, and in the end none.
    if pairs < 1024:
        return _Config(2, 512 if pairs < 768 else 1024, 64, num_warps=2, num_stages=2)
    if pairs < _MANY_PAIRS:
        return _Config(2, 1024, 32, num_warps=2, num_stages=2)
    return _Config(1, 1, 32, 1, 2, tokens_first=True)


def _round_down(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kind: AttentionKind,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the first `context_lens[b]` cached tokens; a row of length 0 gives zeros.

    Without a workspace one is made for the call, which is for tests: a captured graph wants one
    that outlives it. A cache in FP8 comes with its scales.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if block_tables.shape[0] != batch or context_lens.shape != (batch,):
        raise ValueError(f"batch {batch}: tables {block_tables.shape}, lens {context_lens.shape}")
    out = output_for(q, out)
    if batch:
        check_heads(q, k_cache, v_cache, kv_scales)
        pairs, group = batch * num_kv_heads, num_heads // num_kv_heads
        config = _config(pairs, group, head_dim, q.element_size())
        # All first splits come first: idle splits of short contexts would spoil their placement.
        grid = (num_kv_heads, batch, config.num_splits)
        _launch(
            q, k_cache, v_cache, block_tables, context_lens, kind, out, workspace, config, grid,
            ahead=config.block_n if pairs <= _FEW_TO_PREFETCH else 0, kv_scales=kv_scales,
            sinks=sinks,
        )  # fmt: skip
    return out


def attend_leading(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_rows: torch.Tensor,
    kind: AttentionKind,
    out: torch.Tensor,
    workspace: DecodeWorkspace | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend with the first `num_rows` [1] int32, of B at most, of q [T, H, D]; writes no other."""
    batch, num_kv_heads = len(context_lens), k_cache.shape[2]
    if len(block_tables) != batch or num_rows.dtype != torch.int32:
        raise ValueError(f"{batch} lengths, {len(block_tables)} tables, {num_rows.dtype} num_rows")
    check_heads(q, k_cache, v_cache, kv_scales)
    is_wide = q.shape[2] * q.element_size() > 256
    tile = (16, 2, 2) if is_wide else (32, 1, 3)  # tokens, warps, stages
    config = _Config(0, _LEADING_MIN_SPLIT, *tile)
    # A row has a program for each of its KV heads at least.
    programs = max(min(batch, len(q)), _LEADING_PROGRAMS // num_kv_heads)
    _launch(
        q, k_cache, v_cache, block_tables, context_lens, kind, output_for(q, out), workspace,
        config, (num_kv_heads, programs, 1), num_rows, config.block_n, kv_scales, sinks,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kind: AttentionKind,
    out: torch.Tensor,
    workspace: DecodeWorkspace | None,
    config: _Config,
    grid: tuple[int, int, int],
    num_rows: torch.Tensor | None = None,
    ahead: int = 0,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    if block_tables.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise TypeError("block_tables and context_lens must be int32")
    if block_tables.stride(1) != 1 or context_lens.stride(0) != 1:
        raise ValueError("rows of block_tables and context_lens must be contiguous")
    check_sinks(kind, sinks, num_heads)
    workspace = decode_workspace(q, num_kv_heads) if workspace is None else workspace
    group = num_heads // num_kv_heads
    if workspace.partial.shape[1:] != (group, head_dim):
        raise ValueError(f"workspace of {tuple(workspace.partial.shape)} is for other heads")
    _decode_kernel[grid](
        q, k_cache, v_cache, block_tables, context_lens, num_rows, out,
        workspace.partial, workspace.stats, workspace.arrivals, kv_scales, sinks,
        kind.scale * _LOG2_E, (kind.softcap or 0.0) * _LOG2_E,
        q.stride(0), *k_cache.stride()[:3], block_tables.stride(0),
        GROUP=group,
        GROUP_PAD=max(8 if config.tokens_first else 16, triton.next_power_of_2(group)),
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        NUM_SPLITS=config.num_splits,
        MAX_SPLITS=_MAX_LEADING_SPLITS,
        MAX_SLICES=MAX_SLICES,
        MIN_SPLIT=config.min_split,
        MERGED=min(_MAX_MERGED, config.num_splits or _MAX_LEADING_SPLITS),
        TOKENS_FIRST=config.tokens_first,
        AHEAD=ahead,
        FEW_TO_PREFETCH=_FEW_TO_PREFETCH,
        LINE=min(head_dim, _LINE_BYTES // k_cache.element_size()),
        IS_FP8=kv_scales is not None,
        WINDOW=kind.window or 0,
        HAS_CAP=kind.softcap is not None,
        HAS_SINKS=sinks is not None,
        MERGES_APART=config.merges_apart,
        PDL=has_pdl(q),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q),
    )  # fmt: skip
    if config.merges_apart:
        _merge_kernel[(num_heads, len(context_lens))](
            context_lens, out, workspace.partial, workspace.stats,
            GROUP=group,
            D=head_dim,
            BLOCK_N=config.block_n,
            NUM_SPLITS=config.num_splits,
            MIN_SPLIT=config.min_split,
            WINDOW=kind.window or 0,
            PDL=has_pdl(q),
            num_warps=4,
            **launch_options(q),
        )  # fmt: skip


@triton.jit
def _prefetch(ptrs: tl.tensor) -> None:
    """Asks for the cache lines at these addresses; nothing waits for them."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [ptrs.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch_ahead(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    head_offset: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
) -> None:
    """Asks for the first tile: its way to L2 is gone while the kernel before still makes q."""
    tokens = tl.minimum(start + tl.arange(0, AHEAD), end - 1)
    blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
    offsets = blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token + head_offset
    for line in tl.static_range(0, D, LINE):
        _prefetch(k_ptr + offsets + line)
        _prefetch(v_ptr + offsets + line)


@triton.jit
def capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(scores / cap), for scores and cap in one unit."""
    x = tl.minimum(tl.abs(scores) / cap, 20.0)  # tanh is 1 there
    grown = tl.exp(2.0 * x)
    tanh = (grown - 1.0) / (grown + 1.0)
    return tl.where(scores < 0, -cap * tanh, cap * tanh)


@triton.jit
def _shared_out(
    context_len: tl.tensor,
    num_splits: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(the tokens that a row attends to, and how many of them a split has)."""
    num_keys = context_len
    if WINDOW > 0:
        num_keys = tl.minimum(context_len, WINDOW)
    per_split = tl.maximum(tl.cdiv(num_keys, num_splits), MIN_SPLIT)
    return num_keys, tl.cdiv(per_split, BLOCK_N) * BLOCK_N


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,  # where NUM_SPLITS is 0
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    kv_scales_ptr: tl.tensor,  # [4, KV heads] where IS_FP8
    sinks_ptr: tl.tensor,  # [heads] where HAS_SINKS
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,  # where HAS_CAP
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_SLICES: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    AHEAD: tl.constexpr,
    FEW_TO_PREFETCH: tl.constexpr,
    LINE: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGES_APART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    if NUM_SPLITS > 0:
        seq = tl.program_id(1)
        split = tl.program_id(2)
        num_splits = NUM_SPLITS
    else:
        # As in a grid of (KV heads, rows, splits): all first splits come first.
        num_rows = tl.maximum(tl.load(num_rows_ptr), 1)
        num_splits = tl.minimum(tl.num_programs(1) // num_rows, MAX_SPLITS)
        # The workspace holds no more; a row of one split needs none of it.
        most = tl.maximum(MAX_SLICES // (num_rows * tl.num_programs(0)), 1)
        num_splits = tl.minimum(num_splits, most)
        seq = tl.program_id(1) % num_rows
        split = tl.program_id(1) // num_rows
    num_kv_heads = tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D)
    is_head = heads < GROUP
    row = seq.to(tl.int64) * num_kv_heads + head  # one (sequence, KV head) pair
    out_offsets = (row * GROUP + heads)[:, None] * D + dims[None, :]
    context_len = tl.load(lens_ptr + seq)
    num_keys, per_split = _shared_out(context_len, num_splits, WINDOW, MIN_SPLIT, BLOCK_N)
    start = context_len - num_keys + split * per_split
    end = tl.minimum(start + per_split, context_len)
    if start >= end:
        if PDL:
            gdc_wait()
        if (context_len == 0) & (split == 0):
            zeros = tl.zeros([GROUP_PAD, D], out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offsets, zeros, mask=is_head[:, None])
        return

    table = tables_ptr + seq.to(tl.int64) * stride_table
    if PDL and AHEAD > 0 and (NUM_SPLITS > 0 or num_rows * num_kv_heads <= FEW_TO_PREFETCH):
        _fetch_ahead(
            k_ptr, v_ptr, table, start, end, head * stride_head, stride_block, stride_token,
            D, BLOCK_SIZE, AHEAD, LINE,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    q_offsets = seq.to(tl.int64) * stride_q + (head * GROUP + heads)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_head[:, None], other=0.0)  # [GROUP_PAD, D]
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - the second is known on the device alone
        if split == 0:
            sinks = tl.load(sinks_ptr + head * GROUP + heads, mask=is_head, other=0.0)
            peak = sinks.to(tl.float32) * 1.4426950408889634
            total += 1.0
    if TOKENS_FIRST:
        acc = tl.zeros([D, GROUP_PAD], tl.float32)
    else:
        acc = tl.zeros([GROUP_PAD, D], tl.float32)
    if IS_FP8:  # the values' scale is applied to their sum
        scale_log2 *= tl.load(kv_scales_ptr + head)
        if q.dtype == tl.bfloat16:
            # Every FP8 number is a float16 number, to which it is widened with much less work than
            # to bfloat16. Nothing of q is lost but what is 2^-24 of its largest value.
            largest = tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0)
            largest = tl.where(largest > 0.0, largest, 1.0)
            q = (q.to(tl.float32) / largest).to(tl.float16)
            scale_log2 *= largest
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < end
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offsets = blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token + head * stride_head
        kv_offsets = offsets[:, None] + dims[None, :]
        k = tl.load(k_ptr + kv_offsets, mask=valid[:, None], other=0.0).to(q.dtype)  # [BLOCK_N, D]
        if TOKENS_FIRST:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
            if HAS_CAP:
                scores = capped(scores, cap_log2)
            scores = tl.where(valid[:, None], scores, float("-inf"))  # [BLOCK_N, GROUP_PAD]
            new_peak = tl.maximum(peak, tl.max(scores, 0))
            weights = tl.exp2(scores - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
            v = tl.load(v_ptr + kv_offsets, mask=valid[:, None], other=0.0).to(q.dtype)
            acc = acc * shrink[None, :]
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 0)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            if HAS_CAP:
                scores = capped(scores, cap_log2)
            scores = tl.where(valid[None, :], scores, float("-inf"))  # [GROUP_PAD, BLOCK_N]
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            v = tl.load(v_ptr + kv_offsets, mask=valid[:, None], other=0.0).to(q.dtype)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    if TOKENS_FIRST:
        acc = tl.trans(acc)
    if IS_FP8:
        acc *= tl.load(kv_scales_ptr + num_kv_heads + head)

    num_active = tl.cdiv(num_keys, per_split)
    if num_active == 1:
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_offsets, result, mask=is_head[:, None])
        return

    slot = row * num_splits + split
    partial_offsets = (slot * GROUP + heads)[:, None] * D + dims[None, :]
    tl.store(partial_ptr + partial_offsets, acc, mask=is_head[:, None])
    tl.store(stats_ptr + slot * 2 * GROUP + heads, peak, mask=is_head)
    tl.store(stats_ptr + (slot * 2 + 1) * GROUP + heads, total, mask=is_head)
    if MERGES_APART:
        return
    # All threads must have stored before the one that counts the arrival says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == num_active - 1:
        tl.store(arrivals_ptr + row, 0)
        for g in tl.static_range(GROUP):
            top = float("-inf")
            merged_total = 0.0
            merged = tl.zeros([D], tl.float32)
            for first in range(0, num_active, MERGED):
                splits = first + tl.arange(0, MERGED)
                active = splits < num_active
                slots = row * num_splits + splits
                stats = stats_ptr + slots * 2 * GROUP + g
                offsets = (slots * GROUP + g)[:, None] * D + dims[None, :]
                # From L2: this multiprocessor may hold stale lines of the workspace.
                peaks = tl.load(stats, mask=active, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(stats + GROUP, mask=active, other=0.0, cache_modifier=".cg")
                parts = tl.load(
                    partial_ptr + offsets, mask=active[:, None], other=0.0, cache_modifier=".cg"
                )
                new_top = tl.maximum(top, tl.max(peaks, 0))
                share = tl.exp2(peaks - new_top)
                shrink = tl.exp2(top - new_top)
                merged = merged * shrink + tl.sum(parts * share[:, None], 0)
                merged_total = merged_total * shrink + tl.sum(totals * share, 0)
                top = new_top
            result = (merged / merged_total).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row * GROUP + g) * D + dims, result)


@triton.jit
def _merge_kernel(
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merges the splits of one query head of one sequence, where it has more than one."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    num_keys, per_split = _shared_out(
        tl.load(lens_ptr + seq), NUM_SPLITS, WINDOW, MIN_SPLIT, BLOCK_N
    )
    num_active = tl.cdiv(num_keys, per_split)
    if PDL:
        gdc_wait()
    if num_active > 1:
        splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, D)
        active = splits < num_active
        row = seq * (tl.num_programs(0) // GROUP) + head // GROUP
        slots = row * NUM_SPLITS + splits
        stats = stats_ptr + slots * 2 * GROUP + head % GROUP
        offsets = (slots * GROUP + head % GROUP)[:, None] * D + dims[None, :]
        peaks = tl.load(stats, mask=active, other=float("-inf"))
        totals = tl.load(stats + GROUP, mask=active, other=0.0)
        parts = tl.load(partial_ptr + offsets, mask=active[:, None], other=0.0)
        share = tl.exp2(peaks - tl.max(peaks, 0))
        merged = tl.sum(parts * share[:, None], 0) / tl.sum(totals * share, 0)
        to = (seq * tl.num_programs(0) + head) * D + dims
        tl.store(out_ptr + to, merged.to(out_ptr.dtype.element_ty))
