# mypy: disable-error-code="untyped-decorator"
"""Keeps the tokens that grammars allow, and makes changed rows of logits ready to be sampled from.

    logits [R, V] float32  ->  logits, changed in place; has_choice [N] bool

A program has one of N rows. A token that is not allowed gets the lowest finite logit, as does one
that has minus infinity already. A row that has no token left, or was not finite before it was
changed, or is not now, gets NaN, which sampling tells from all others.
"""

import torch
import triton
import triton.language as tl

_STEP = 8192
_LOWEST = torch.finfo(torch.float32).min


def restrict_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    masks_of_rows: torch.Tensor,
    was_finite: torch.Tensor,
    masks: torch.Tensor,
) -> torch.Tensor:
    """True for each of N rows of logits, none twice, that has a token left, also if not finite.

    rows [N] are their places in logits; masks_of_rows [N] have the line of masks [G, W] int32 that
    says what a row may take, one bit for each token, lowest first, or -1: all, or -2: nothing
    changed the row, and it stays as it is; was_finite [N] bool tells of the logits before anything
    changed them.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise TypeError("logits must be float32 with adjacent columns")
    if not {rows.dtype, masks_of_rows.dtype} <= {torch.int32, torch.int64}:
        raise TypeError("rows and masks_of_rows must be int32 or int64")
    if masks.dtype != torch.int32 or not masks.is_contiguous() or was_finite.dtype != torch.bool:
        raise TypeError("masks must be contiguous int32, and was_finite bool")
    if not len(rows) == len(masks_of_rows) == len(was_finite):
        raise ValueError(f"{num_rows} rows, {len(masks_of_rows)} of masks, {len(was_finite)} flags")
    has_choice = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        _restrict_kernel[(num_rows,)](
            logits, logits.stride(0), rows, masks_of_rows, was_finite.view(torch.uint8), masks,
            masks.shape[1], has_choice.view(torch.uint8), vocab_size,
            LOWEST=_LOWEST, STEP=_STEP, num_warps=16,
        )  # fmt: skip
    return has_choice


@triton.jit(do_not_specialize=["num_words"])
def _restrict_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    rows_ptr: tl.tensor,
    masks_of_rows_ptr: tl.tensor,
    was_finite_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    num_words: tl.tensor,
    has_choice_ptr: tl.tensor,
    vocab_size: tl.tensor,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    mask = tl.load(masks_of_rows_ptr + index).to(tl.int64)
    num_bad = 0
    num_left = 1
    if mask > -2:
        logits_ptr += tl.load(rows_ptr + index).to(tl.int64) * logits_stride
        is_free = (mask < 0).to(tl.int32)
        num_masked = num_words * (1 - is_free)
        masks_ptr += mask * num_words
        at = tl.arange(0, STEP)
        is_bad = tl.zeros([STEP], tl.int32)  # per lane: NaN or infinity
        is_left = tl.zeros([STEP], tl.int32)
        for first in range(0, vocab_size, STEP):
            token = first + at
            exists = token < vocab_size
            x = tl.load(logits_ptr + token, mask=exists, other=float("-inf"))
            word = token // 32
            # None of the tokens after a mask's end; all of a row without a mask.
            bits = tl.load(masks_ptr + word, mask=word < num_masked, other=0)
            is_allowed = (((bits >> (token % 32)) & 1) | is_free) != 0
            x = tl.where(is_allowed, x, float("-inf"))
            is_bad |= ((x != x) | (x == float("inf"))).to(tl.int32)
            is_left |= (x > float("-inf")).to(tl.int32)
            tl.store(logits_ptr + token, tl.where(x > LOWEST, x, LOWEST), mask=exists)
        num_bad = tl.sum(is_bad, 0) + (tl.load(was_finite_ptr + index) == 0).to(tl.int32)
        num_left = tl.sum(is_left, 0)
        tl.debug_barrier()  # the row is written
        if (num_bad > 0) | (num_left == 0):
            tl.store(logits_ptr, float("nan"))
    has_choice = tl.where(num_bad + num_left > 0, 1, 0)
    tl.store(has_choice_ptr + index, has_choice.to(tl.uint8))
