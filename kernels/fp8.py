"""Keys and values in FP8: types, scales, and rounding that saturates.

A key or value x is stored as the FP8 number nearest to x / scale, ties to even, and counts as that
number times the scale. What is beyond the largest finite number becomes that number. What is not
finite becomes NaN in both types, so that a step that computes it fails as it does without FP8.

Keys may be stored less an offset for each head and channel, [Hkv, D] float32: x - offset, with x of
the model's type, in place of x. An offset moves all scores of a query by the same amount, which
softmax does not see, so nothing that reads a cache knows of it. Rounding is relative to the number
stored: a channel whose keys are all about as large loses less in this way.

A layer's scales are a table [4, Hkv] float32: of keys, of values, then their inverses, by which
writers multiply. Each rank has the columns of its own heads.
"""

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
# Of the CUDA device, for which Triton widens the type.
MIN_CAPABILITY = {torch.float8_e4m3fn: (8, 9), torch.float8_e5m2: (8, 0)}


def is_fp8(dtype: torch.dtype) -> bool:
    """True if it is a type of this module."""
    return dtype in LARGEST


def scale_table(k: Tensor, v: Tensor) -> Tensor:
    """Scales of keys and of values, [..., Hkv] float32 each, with their inverses: [..., 4, Hkv]."""
    return torch.stack((k, v, k.reciprocal(), v.reciprocal()), dim=-2).contiguous()


def check_scales(scales: Tensor | None, cache_dtype: torch.dtype, num_kv_heads: int) -> None:
    """Raises ValueError or TypeError unless the table suits a cache of this type."""
    if (scales is None) == is_fp8(cache_dtype):
        have = "no scales" if scales is None else "scales"
        raise TypeError(f"a cache of {cache_dtype} has {have}: FP8 alone has some")
    if scales is not None:
        _check_table("scales", scales, (4, num_kv_heads))


def check_offsets(
    offsets: Tensor | None, cache_dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    """Raises ValueError or TypeError unless offsets of keys, if any, suit a cache of this type."""
    if offsets is None:
        return
    if not is_fp8(cache_dtype):
        raise TypeError(f"a cache of {cache_dtype} has offsets of keys: FP8 alone has some")
    _check_table("offsets", offsets, (num_kv_heads, head_dim))


def _check_table(name: str, table: Tensor, shape: tuple[int, int]) -> None:
    if table.shape != shape or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 {list(shape)}, not {table.dtype} "
            f"{tuple(table.shape)}"
        )


def narrowed(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., Hkv, D] in FP8; `inverse` [Hkv] is one of the scales' inverses."""
    largest = LARGEST[dtype]
    scaled = (x.float() * inverse.unsqueeze(-1)).clamp(-largest, largest)
    return scaled.masked_fill(~x.isfinite(), torch.nan).to(dtype)


def widened(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of stored keys or values [..., Hkv, D], in this type; `scale` is [Hkv]."""
    return (stored.float() * scale.unsqueeze(-1)).to(dtype)
