"""Linear layers on CPU: weights in the layout of the C kernels."""

import torch
from torch import Tensor

from kernels.cpu.library import Library, PackedLinear, supports_groups
from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.rounding import quantized
from worker_svc.models.cpu_weights import ROWS_AT_ONCE, Multiply
from worker_svc.models.linear import Linear
from worker_svc.models.stored.weight_files import WeightError
from worker_svc.quantization.online import Rounding


def packed(library: Library, linear: Linear, rounding: Rounding | None = None) -> PackedLinear:
    """Moves the weight to the kernels' layout: integers, if it has them, else float numbers.

    Float numbers become integers with `rounding`. Raises WeightError if they cannot.
    """
    grouped = linear.grouped
    if grouped is None and rounding is not None:
        grouped = _rounded(linear.weight, rounding)
    if grouped is not None and supports_groups(grouped):
        moved = library.pack_groups(grouped, linear.bias)
    else:
        moved = library.pack(linear.weight, linear.bias)
    linear.drop_weight()
    return moved


def product_of(library: Library, weight: Tensor) -> Multiply:
    """x [T, K] -> x @ W.T by the kernels' layout of a weight [N, K], which stays as it is."""
    moved = library.pack(weight, None)

    def multiply(x: Tensor) -> Tensor:
        return library.linear(x, moved, x.new_empty((len(x), moved.num_outputs)))

    return multiply


def _rounded(weight: Tensor, rounding: Rounding) -> GroupedWeight:
    try:
        parts = [
            quantized(rows, rounding.bits, rounding.group)
            for rows in torch.split(weight, ROWS_AT_ONCE)
        ]
    except ValueError as error:
        raise WeightError(f"lm_head.{error}") from None
    return GroupedWeight.concatenated(parts)
