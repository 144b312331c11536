# mypy: disable-error-code="untyped-decorator"
"""Functions that the recurrences have in common; results are float32."""

import torch
import triton
import triton.language as tl


def precision(channels: torch.Tensor) -> str:
    """The precision of products of float32 numbers, by the type of the channels."""
    return "tf32x3" if channels.dtype == torch.float32 else "tf32"


@triton.jit
def state_row(rows_ptr: tl.tensor, segment: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """The first number of a segment's row of states; see `check_rows`, of alignment 4."""
    return tl.multiple_of(tl.load(rows_ptr + segment) * stride, 4)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), also where exp(x) is next to nothing and the device's log is not exact."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # at most 1 / 3; log(1 + y) = 2 atanh(s)
    z = s * s
    total = 1.0 / 17 + z * (1.0 / 19)
    total = 1.0 / 13 + z * (1.0 / 15 + z * total)
    total = 1.0 / 9 + z * (1.0 / 11 + z * total)
    total = 1.0 / 5 + z * (1.0 / 7 + z * total)
    total = 1.0 + z * (1.0 / 3 + z * total)
    return tl.maximum(x, 0.0) + 2.0 * s * total


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)), of which no part overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def decays_between(since: tl.tensor) -> tl.tensor:
    """exp(since[i] - since[j]) of float64 sums [N] that fall, in float32; 0 where j > i.

    The difference is small next to the sums: each is taken in two parts of float32.
    """
    high = since.to(tl.float32)
    low = (since - high.to(tl.float64)).to(tl.float32)
    i = tl.arange(0, since.shape[0])
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    is_seen = i[:, None] >= i[None, :]
    return tl.where(is_seen, tl.exp(tl.where(is_seen, difference, 0.0)), 0.0)


@triton.jit
def product(a: tl.tensor, b: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """total + a b, of a in the type of channels and b in float32.

    With bfloat16 b is taken in two parts that have 16 digits together: tensor cores multiply both
    in the time of one product in TF32, which has 11, and read them from shared memory as they are.
    """
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        total = tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), acc=total)
        total = tl.dot(a, high, acc=total)
    else:
        total = tl.dot(a.to(tl.float32), b, acc=total, input_precision=PRECISION)
    return total


@triton.jit
def weighted(
    weights: tl.tensor, x: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """total + weights x, of weights in float32 and x in the type of channels."""
    if x.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        total = tl.dot((weights - high.to(tl.float32)).to(tl.bfloat16), x, acc=total)
        total = tl.dot(high, x, acc=total)
    else:
        total = tl.dot(weights, x.to(tl.float32), acc=total, input_precision=PRECISION)
    return total


@triton.jit
def square_product(
    a: tl.tensor, b: tl.tensor, IS_BF16: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """a b, of float32 numbers both of which are taken in two parts with bfloat16."""
    if IS_BF16:
        high = a.to(tl.bfloat16)
        total = tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b.to(tl.bfloat16))
        total = product(high, b, total, PRECISION)
    else:
        total = tl.dot(a, b, input_precision=PRECISION)
    return total
