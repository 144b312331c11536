# mypy: disable-error-code="untyped-decorator"
"""Presence, frequency and repetition penalties of some rows of logits, in one launch.

    logits [R, V] float32, token_rows [S, L] int32  ->  logits, changed in place

A program has a row. It counts the row's output tokens, computes the new logit of every token of the
prompt and the output from the old one, and writes them when all are computed: a token that occurs
several times is written several times with the same value.
"""

import torch
import triton
import triton.language as tl

_CHUNK = 1024


def penalize(
    logits: torch.Tensor,
    token_rows: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor,
    longest: int,
) -> None:
    """Penalizes N rows, none of them twice.

    rows [4, N] int32 or int64 has for each its row of logits (-1: none), its slot, and how many
    tokens of that slot's row are the prompt's and are known; factors [3, N] float32 has the
    presence, frequency (0 is off) and repetition (1 is off) penalties; no row has more than
    `longest` tokens.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise TypeError("logits must be float32 with adjacent columns")
    if token_rows.dtype != torch.int32 or rows.dtype not in (torch.int32, torch.int64):
        raise TypeError("token_rows must be int32, and rows int32 or int64")
    if rows.stride(1) != 1 or factors.stride(1) != 1:
        raise ValueError("rows and factors must have adjacent columns")
    count = rows.shape[1]
    counts = torch.zeros((count, logits.shape[1]), dtype=torch.int32, device=logits.device)
    changed = torch.empty((count, longest), dtype=torch.float32, device=logits.device)
    _penalize_kernel[(count,)](
        logits, logits.stride(0), token_rows, token_rows.stride(0), rows, rows.stride(0), factors,
        factors.stride(0), counts, changed, logits.shape[1], longest, CHUNK=_CHUNK, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_stride", "factors_stride", "longest"])
def _penalize_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    tokens_ptr: tl.tensor,
    tokens_stride: tl.tensor,
    rows_ptr: tl.tensor,
    rows_stride: tl.tensor,
    factors_ptr: tl.tensor,
    factors_stride: tl.tensor,
    counts_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    vocab_size: tl.tensor,
    longest: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row >= 0:
        logits_ptr += row * logits_stride
        tokens_ptr += tl.load(rows_ptr + rows_stride + index).to(tl.int64) * tokens_stride
        num_prompt = tl.load(rows_ptr + 2 * rows_stride + index)
        num_tokens = tl.load(rows_ptr + 3 * rows_stride + index)
        presence = tl.load(factors_ptr + index)
        frequency = tl.load(factors_ptr + factors_stride + index)
        repetition = tl.load(factors_ptr + 2 * factors_stride + index)
        counts_ptr += index * vocab_size
        changed_ptr += index * longest
        at = tl.arange(0, CHUNK)
        for first in range(0, num_tokens, CHUNK):
            known = first + at < num_tokens
            token = tl.load(tokens_ptr + first + at, mask=known, other=0)
            is_output = known & (first + at >= num_prompt)
            tl.atomic_add(counts_ptr + token, 1, mask=is_output)
        tl.debug_barrier()  # the counts are complete
        for first in range(0, num_tokens, CHUNK):
            known = first + at < num_tokens
            token = tl.load(tokens_ptr + first + at, mask=known, other=0)
            # Counted in the L2 cache, so it is read there.
            said = tl.load(counts_ptr + token, mask=known, other=0, cache_modifier=".cg")
            logit = tl.load(logits_ptr + token, mask=known, other=0.0)
            scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            scaled -= frequency * said.to(tl.float32)
            scaled -= tl.where(said > 0, presence, 0.0)
            tl.store(changed_ptr + first + at, scaled, mask=known)
        tl.debug_barrier()  # every logit was read
        for first in range(0, num_tokens, CHUNK):
            known = first + at < num_tokens
            token = tl.load(tokens_ptr + first + at, mask=known, other=0)
            changed = tl.load(changed_ptr + first + at, mask=known, other=0.0)
            tl.store(logits_ptr + token, changed, mask=known)
