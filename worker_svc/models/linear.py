"""Linear layers, with weights in the layout that their device multiplies fastest.

A weight is float numbers, integers or 8-bit floats, whichever its parts were filled with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.cpu_weights import ROWS_AT_ONCE, Multiply, pack

Narrow = GroupedWeight | ScaledWeight  # a weight stored in fewer bits


class Linear:
    """y = x W^T + b. Call `pack` once the weight and the bias are filled.

    The weight takes memory from its first use on, so that one filled with integers never takes
    that of its float numbers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])  # (N, K)
        self.bias = bias  # [N]
        self._narrow: Narrow | None = None  # the weight [N, K], if all of it is in fewer bits
        self._weight: Tensor | None = weight
        self._dtype, self._device = weight.dtype, weight.device
        self._parts: dict[int, Narrow] = {}  # first output -> outputs in fewer bits
        self._packed: Multiply | None = None
        # Adds to y [T, N] in place what adapters make of x [T, K]; None: there are none.
        self.adapt: Callable[[Tensor, Tensor], None] | None = None

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Linear":
        """A layer with uninitialized memory, to be filled from a checkpoint."""
        without_memory = torch.empty((), dtype=dtype, device=device)
        linear = cls(
            without_memory.expand(out_features, in_features),
            torch.empty(out_features, dtype=dtype, device=device) if bias else None,
        )
        linear._weight = None
        return linear

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K]; computed from integers, and kept, if those are what it has."""
        if self._weight is None:
            self._weight = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            if self._narrow is not None:
                self._parts[0] = self._narrow
            for begin, part in self._parts.items():
                dequantize(part, self._weight[begin:])
            self._parts.clear()
            if self._device.type != "cpu":
                self._narrow = None  # not needed any more
        return self._weight

    @property
    def dtype(self) -> torch.dtype:
        """The type of float numbers."""
        return self._dtype

    @property
    def grouped(self) -> GroupedWeight | None:
        """The weight [N, K], if all of it is integers."""
        return self._narrow if isinstance(self._narrow, GroupedWeight) else None

    @property
    def is_packed(self) -> bool:
        """True if `pack` has moved the weight to a layout of its own."""
        return self._packed is not None

    def take_narrow(self) -> Narrow | None:
        """Gives away a weight in fewer bits; None if the layer has float numbers."""
        found, self._narrow = self._narrow, None
        return found if self._weight is None else None

    def give(self, weight: Tensor) -> None:
        """Replaces the weight [N, K] by float numbers of the layer's type and device."""
        self._weight = weight

    @property
    def is_wide(self) -> bool:
        """True if the weight is float numbers, which integers that fill a part of it become."""
        return self._weight is not None

    @property
    def whole(self) -> "WeightRows":
        """All outputs of the weight, to be filled."""
        return self.rows(0, self.shape[0])

    def rows(self, begin: int, end: int) -> "WeightRows":
        """Outputs [begin, end) of the weight, to be filled."""
        return WeightRows(self, begin, end)

    def put_narrow(self, begin: int, part: Narrow) -> None:
        """Fills outputs from `begin` on in fewer bits.

        They become float numbers if others already are, or are in fewer bits of another kind.
        """
        if self._weight is not None:
            dequantize(part, self._weight[begin:])
            return
        self._parts[begin] = part
        parts = [one for _, one in sorted(self._parts.items())]
        if len({type(one) for one in parts}) > 1:
            assert self.weight is not None  # computed from the parts
        elif sum(one.shape[0] for one in parts) == self.shape[0]:
            self._parts.clear()
            self._narrow = _joined(parts)

    def pack(self) -> None:
        """Moves the weight to the device's layout; the plain copy is freed with its last owner."""
        if self._device.type != "cpu" and self._narrow is not None:
            return  # the fused layers take it as it is
        self._packed = pack(self.weight, self.bias)
        self._narrow = None
        if self._packed is not None:
            self.drop_weight()

    def multiply_by(self, product: Multiply) -> None:
        """Has another product in place of the weight, which that has taken over."""
        self._packed = product
        self.drop_weight()

    def drop_weight(self) -> None:
        """Gives up the weight, which other code has copied; others may still hold it."""
        self._weight = torch.empty(0, dtype=self._dtype, device=self._device)
        self._narrow = None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)
        if self.adapt is not None:
            self.adapt(x, y)
        return y


def _joined(parts: list[Narrow]) -> Narrow:
    """Outputs of all parts, one part after the other; they are of one kind."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if grouped:
        return GroupedWeight.concatenated(grouped)
    return ScaledWeight.concatenated([part for part in parts if isinstance(part, ScaledWeight)])


def dequantize(part: Narrow, to: Tensor) -> None:
    """Writes the first outputs of a weight; never has a float32 copy of a whole head."""
    for begin in range(0, part.shape[0], ROWS_AT_ONCE):
        rows = part.rows(begin, begin + ROWS_AT_ONCE)
        to[begin : begin + rows.shape[0]] = rows.dequantized(to.dtype)


@dataclass(frozen=True, slots=True)
class WeightRows:
    """A destination: outputs [begin, end) of a linear layer's weight."""

    linear: Linear
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, K)."""
        return self.end - self.begin, self.linear.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of float numbers."""
        return self.linear.dtype

    def within(self, begin: int, end: int) -> "WeightRows":
        """Outputs [begin, end) of these."""
        return WeightRows(self.linear, self.begin + begin, self.begin + end)

    @property
    def values(self) -> Tensor:
        """A view of the float numbers."""
        return self.linear.weight[self.begin : self.end]

    def copy_(self, values: Tensor) -> None:
        """Fills them with float numbers of any type and device."""
        self.values.copy_(values)

    def put_narrow(self, values: Narrow) -> None:
        """Fills them in fewer bits. Raises ValueError for another shape."""
        if values.shape != self.shape:
            raise ValueError(f"a weight {list(values.shape)}: not {list(self.shape)}")
        self.linear.put_narrow(self.begin, values)
