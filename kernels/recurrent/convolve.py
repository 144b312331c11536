# mypy: disable-error-code="untyped-decorator"
"""The short convolution before a recurrence, over the tokens of many sequences at once.

    x [T, C], weight [C, W], states [R, C, W - 1]           ->  silu(sums) [T, C]
    b | c | x [T, 3 C], weight [C, W], states [R, C, W - 1]  ->  c * sums(b * x) [T, C]

Each segment reads its row of states, the W - 1 inputs before its first token, and writes the last
W - 1 inputs to another row. Sums are float32. A sum is that of `convolution.causal_conv`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.functions import sigmoid
from kernels.recurrent.segments import CHUNK, Segments, check_rows

_BLOCK_OF_ONE_TOKEN, _BLOCK = 256, 128  # channels of a program
_STEP = 16  # tokens of a chunk that a program holds in registers


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    waves: Sequence[Segments],
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Returns the outputs of all tokens, and writes the states after each segment.

    A segment of a later wave may read what an earlier one has written.
    """
    channels, width = weight.shape
    if x.shape[1] != (3 * channels if gated else channels) or x.stride(1) != 1:
        raise ValueError(f"inputs {tuple(x.shape)} do not fit {channels} channels")
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        raise ValueError("weight and bias must be contiguous")
    check_rows(states, (channels, width - 1))
    out = x.new_empty((len(x), channels))
    for segments in waves:
        bounds = segments.bounds
        block = _BLOCK_OF_ONE_TOKEN if bounds is None else _BLOCK
        num_parts = len(segments) if bounds is None else bounds.num_chunks
        _convolve_kernel[(num_parts, triton.cdiv(channels, block))](
            x, weight, bias, states, segments.before, segments.after, segments.is_first,
            segments.begin,
            segments.end,
            None if bounds is None else bounds.of_chunk,
            out,
            x.stride(0),
            states.stride(0),
            C=channels,
            WIDTH=width,
            CHUNK=1 if bounds is None else CHUNK,
            BLOCK_T=1 if bounds is None else _STEP,
            BLOCK_C=block,
            HAS_BOUNDS=bounds is not None,
            HAS_BIAS=bias is not None,
            IS_GATED=gated,
            PDL=has_pdl(x),
            num_warps=2 if bounds is None else 4,
            **launch_options(x),
        )  # fmt: skip
    return out


@triton.jit
def _inputs(
    x_ptr: tl.tensor, offsets: tl.tensor, inside: tl.tensor, C: tl.constexpr, IS_GATED: tl.constexpr
) -> tl.tensor:
    """The inputs of the convolution, in float32, rounded as they are stored in states."""
    x = tl.load(x_ptr + offsets + (2 * C if IS_GATED else 0), mask=inside, other=0.0)
    if IS_GATED:
        b = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        x = (b.to(tl.float32) * x.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def _convolve_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    first_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    of_chunk_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    stride_states: tl.tensor,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_c = c < C
    bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + c, mask=is_c, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    segment, begin, end, first = part, part, part + 1, part
    if HAS_BOUNDS:
        segment = tl.load(of_chunk_ptr + part)
        begin = tl.load(begin_ptr + segment)
        end = tl.load(end_ptr + segment)
        first = begin + (part - begin // CHUNK - segment) * CHUNK
        if (first < begin) | (first >= end):
            return
    num_old = (WIDTH - 1) * (1 - tl.load(first_ptr + segment).to(tl.int32))
    read_ptr = states_ptr + tl.load(before_ptr + segment) * stride_states + c * (WIDTH - 1)
    for skipped in range(0, CHUNK, BLOCK_T):
        t = first + skipped + tl.arange(0, BLOCK_T)
        wanted = (t < end)[:, None] & is_c[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32) + bias[None, :]
        for back in tl.static_range(WIDTH):
            at = t - (WIDTH - 1 - back)
            is_own = (at >= begin)[:, None] & wanted
            offsets = at.to(tl.int64)[:, None] * stride_x + c[None, :]
            x = _inputs(x_ptr, offsets, is_own, C, IS_GATED)
            if back < WIDTH - 1:
                place = at - begin + (WIDTH - 1)
                is_old = ((at < begin) & (at >= begin - num_old))[:, None] & wanted
                old = tl.load(read_ptr[None, :] + place[:, None], mask=is_old, other=0.0)
                x += old.to(tl.float32)  # one of the two is 0
            w = tl.load(weight_ptr + c * WIDTH + back, mask=is_c, other=0.0).to(tl.float32)
            total += x * w[None, :]
        if IS_GATED:
            gates = x_ptr + C + t.to(tl.int64)[:, None] * stride_x + c[None, :]
            total *= tl.load(gates, mask=wanted, other=0.0).to(tl.float32)
        else:
            total *= sigmoid(total)
        to = t.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=wanted)
    if end <= first + CHUNK:
        write_ptr = states_ptr + tl.load(after_ptr + segment) * stride_states + c * (WIDTH - 1)
        for back in tl.static_range(WIDTH - 1):
            last = tl.zeros_like(c) + (end - (WIDTH - 1) + back)
            is_new = is_c & (last >= begin)
            kept = _inputs(x_ptr, last.to(tl.int64) * stride_x + c, is_new, C, IS_GATED)
            still = is_c & (last < begin) & (last >= begin - num_old)
            moved = tl.load(read_ptr + (last - begin + (WIDTH - 1)), mask=still, other=0.0)
            kept += moved.to(tl.float32)
            tl.store(write_ptr + back, kept.to(states_ptr.dtype.element_ty), mask=is_c)
