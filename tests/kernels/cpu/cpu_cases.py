"""Libraries under test for the C kernels: each instruction set of this machine, each dtype."""

import functools
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import isa
from kernels.cpu.library import Library, load
from kernels.quantized.grouped import MIDDLE, GroupedWeight, offsets_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARIES = [(one.name, dtype) for one in isa.available() for dtype in DTYPES]
COMBINATIONS = [
    pytest.param((name, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, dtype in LIBRARIES
]


@functools.cache
def library_for(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Library | None:
    """The library; None without a compiler, or if it lacks the instruction set."""
    return load(dtype, {**os.environ, isa.VARIABLE: name}, kv_dtype)


def require(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Library:
    """The library, or skips the test."""
    found = library_for(name, dtype, kv_dtype)
    if found is None:
        pytest.skip(f"no C compiler for {name}")
    return found


def randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """The same random numbers at every call, rounded to the dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn_groups(
    shape: tuple[int, int], bits: int, group: int, *, has_half_scales: bool = True
) -> GroupedWeight:
    """The same random integers at every call; float16 scales and offsets, or float32 ones."""
    generator = torch.Generator().manual_seed(3)
    integers = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales, offsets = torch.rand((2, shape[0], shape[1] // group), generator=generator)
    scales, offsets = (scales + 0.5) / 2**bits, -offsets
    if has_half_scales:
        scales, offsets = scales.half().float(), offsets.half().float()
    return GroupedWeight(integers, scales, offsets, bits)


def whole_numbers(dtype: torch.dtype, rows: int, inputs: int, group: int) -> Tensor:
    """Rows whose largest number is 127 in every group, so that rounding leaves them as they are."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-126, 127, (rows, inputs // group, group), generator=generator)
    x[..., 3] = 127
    x[:, ::2, 3] = -127
    return x.view(rows, inputs).to(dtype)


def whole_weight(shape: tuple[int, int], bits: int, group: int) -> GroupedWeight:
    """Random integers, least and largest ones among them, with a scale of 1 / 64 and zero points.

    Products with `whole_numbers` are exact in float32.
    """
    weight = drawn_groups(shape, bits, group)
    weight.integers[:, :8] = torch.tensor([0, 2**bits - 1] * 4, dtype=torch.uint8)
    weight.scales.fill_(1 / 64)
    zeros = torch.arange(weight.scales.numel()).view(weight.scales.shape) % 121
    zeros = zeros if bits == 4 else torch.full_like(zeros, MIDDLE)
    offsets = offsets_of(zeros.float(), weight.scales, bits)
    return replace(weight, offsets=offsets, rounds_rows=True)


def unaligned(x: Tensor) -> Tensor:
    """A copy that starts one element after an allocation, so only element-aligned."""
    room = x.new_empty(x.numel() + 1)
    view = room[1:].view(x.shape)
    return view.copy_(x)
