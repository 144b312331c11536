"""Rounds a float weight to integers in groups, for weights that are stored without them."""

import torch
from torch import Tensor

from kernels.quantized.grouped import BITS, MIDDLE, ZERO_UNITS, GroupedWeight, offsets_of

HALF_ERROR = 2.0**-11  # of float16, relative to a number that is neither subnormal nor too large


def quantized(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """The nearest integers to a weight [N, K], group by group, for rows that are rounded, too.

    8 bits are multiples of the scale around 0; 4 bits have a zero point that is a multiple of an
    eighth of a step. An element is off by at most half a step of its group, with 4 bits by another
    sixteenth, and by 2**-11 of the group's largest magnitude. A step is the largest magnitude
    divided by 127, or the range, which includes 0, divided by 15. Scales are float16 numbers
    wherever those are as good, which kernels read in half the bytes. Raises ValueError for other
    bits, for groups that do not divide K, and for a weight that is not finite.
    """
    if bits not in BITS:
        raise ValueError(f"bits: {bits} is none of {BITS}")
    num_outputs, num_inputs = weight.shape
    if group < 1 or num_inputs % group:
        raise ValueError(f"group: {group} does not divide {num_inputs} inputs")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight: not every element is finite")
    values = weight.float().view(num_outputs, num_inputs // group, group)
    scales, zeros = _eight_bits(values) if bits == 8 else _four_bits(values)
    steps, units = torch.where(scales > 0, scales, 1), ZERO_UNITS[bits]
    integers = (values / steps[..., None] + zeros[..., None] / units).round_()
    return GroupedWeight(
        integers.clamp_(0, 2**bits - 1).to(torch.uint8).view(weight.shape),
        scales,
        offsets_of(zeros, scales, bits),
        bits,
        rounds_rows=True,
    )


def _eight_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _in_half(values.abs().amax(dim=-1) / (MIDDLE - 1))
    return scales, torch.full_like(scales, MIDDLE)


def _four_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    least, largest = values.amin(dim=-1).clamp_(max=0), values.amax(dim=-1).clamp_(min=0)
    scales = _in_half((largest - least) / 15)
    steps = torch.where(scales > 0, scales, 1)
    return scales, (least / steps).mul_(-ZERO_UNITS[4]).round_().clamp_(0, 15 * ZERO_UNITS[4])


def _in_half(numbers: Tensor) -> Tensor:
    """The numbers as float16 holds them, unless it would lose more than it rounds ordinary ones."""
    halves = numbers.half().float()
    is_near = (halves - numbers).abs() <= HALF_ERROR * numbers.abs()
    return halves if bool(is_near.all()) else numbers
