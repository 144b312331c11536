"""Rounds a float weight to integers in groups, for weights that are stored without them."""

import torch
from torch import Tensor

from kernels.quantized.grouped import BITS, GroupedWeight

HALF_ERROR = 2.0**-11  # of float16, relative to a number that is neither subnormal nor too large


def quantized(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """The nearest integers to a weight [N, K] between the least and the largest of each group.

    An element is off by at most half a step of its group, a step being the group's range divided
    by 2**bits - 1, and by 2**-11 of the group's largest magnitude. Scales and offsets are float16
    numbers wherever those are as good, which kernels read in half the bytes. Raises ValueError for
    other bits, for groups that do not divide K, and for a weight that is not finite.
    """
    if bits not in BITS:
        raise ValueError(f"bits: {bits} is none of {BITS}")
    num_outputs, num_inputs = weight.shape
    if group < 1 or num_inputs % group:
        raise ValueError(f"group: {group} does not divide {num_inputs} inputs")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight: not every element is finite")
    values = weight.float().view(num_outputs, num_inputs // group, group)
    least, largest = values.aminmax(dim=-1)
    highest = 2**bits - 1
    offsets = _in_half(least)
    scales = _in_half((largest - offsets) / highest)
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    integers = ((values - offsets[..., None]) / steps[..., None]).round_().clamp_(0, highest)
    return GroupedWeight(integers.to(torch.uint8).view(weight.shape), scales, offsets, bits)


def _in_half(numbers: Tensor) -> Tensor:
    """The numbers as float16 holds them, unless it would lose more than it rounds ordinary ones."""
    halves = numbers.half().float()
    is_near = (halves - numbers).abs() <= HALF_ERROR * numbers.abs()
    return halves if bool(is_near.all()) else numbers
