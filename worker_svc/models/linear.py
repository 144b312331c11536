"""Linear layers, with weights in the layout that their device multiplies fastest.

A weight is float numbers or groups of integers, whichever its parts were filled with.
"""

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
        self.grouped: GroupedWeight | None = None  # the weight [N, K], if all of it is integers
        self.scaled: ScaledWeight | None = None  # the same, if all of it is 8-bit floats
        self._weight: Tensor | None = weight
        self._dtype, self._device = weight.dtype, weight.device
        self._parts: dict[int, Narrow] = {}  # first output -> outputs in fewer bits
        self._packed: Multiply | None = None

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
            whole = self.grouped or self.scaled
            if whole is not None:
                self._parts[0] = whole
            for begin, part in self._parts.items():
                _dequantize(part, self._weight[begin:])
            self._parts.clear()
            if self._device.type != "cpu":
                self.grouped = self.scaled = None  # not needed any more
        return self._weight

    @property
    def dtype(self) -> torch.dtype:
        """The type of float numbers."""
        return self._dtype

    def take_narrow(self) -> Narrow | None:
        """Gives away a weight in fewer bits; None if the layer has float numbers."""
        found, self.grouped, self.scaled = self.grouped or self.scaled, None, None
        return found if self._weight is None else None

    def give(self, weight: Tensor) -> None:
        """Replaces the weight [N, K] by float numbers of the layer's type and device."""
        self._weight = weight

    def rows(self, begin: int, end: int) -> "WeightRows":
        """Outputs [begin, end) of the weight, to be filled."""
        return WeightRows(self, begin, end)

    def put_groups(self, begin: int, part: GroupedWeight) -> None:
        """Fills outputs from `begin` on; integers become floats if the layer has some already."""
        parts = self._put(begin, part)
        grouped = [one for one in parts if isinstance(one, GroupedWeight)]
        if grouped:
            self.grouped = GroupedWeight.concatenated(grouped) if len(grouped) > 1 else grouped[0]

    def put_scaled(self, begin: int, part: ScaledWeight) -> None:
        """The same with 8-bit floats."""
        parts = self._put(begin, part)
        scaled = [one for one in parts if isinstance(one, ScaledWeight)]
        if scaled:
            self.scaled = ScaledWeight.concatenated(scaled) if len(scaled) > 1 else scaled[0]

    def _put(self, begin: int, part: "Narrow") -> "list[Narrow]":
        """All parts, once they are complete and of one layout; others become float numbers."""
        if self._weight is not None:
            _dequantize(part, self._weight[begin:])
            return []
        self._parts[begin] = part
        parts = [one for _, one in sorted(self._parts.items())]
        if len({type(one) for one in parts}) > 1:
            assert self.weight is not None  # computed from the parts, of different layouts
            return []
        if sum(one.shape[0] for one in parts) < self.shape[0]:
            return []
        self._parts.clear()
        return parts

    def pack(self) -> None:
        """Moves the weight to the device's layout; the plain copy is freed with its last owner."""
        if self._device.type != "cpu" and (self.grouped or self.scaled):
            return  # the fused layers take it as it is
        self._packed = pack(self.weight, self.bias)
        self.grouped = self.scaled = None
        if self._packed is not None:
            self.drop_weight()

    def drop_weight(self) -> None:
        """Gives up the weight, which other code has copied; others may still hold it."""
        self._weight = torch.empty(0, dtype=self._dtype, device=self._device)
        self.grouped = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)


def _dequantize(part: Narrow, to: Tensor) -> None:
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
    def values(self) -> Tensor:
        """A view of the float numbers."""
        return self.linear.weight[self.begin : self.end]

    def copy_(self, values: Tensor) -> None:
        """Fills them with float numbers of any type and device."""
        self.values.copy_(values)

    def put_groups(self, values: GroupedWeight) -> None:
        """Fills them with integers. Raises ValueError for another shape."""
        if values.shape != self.shape:
            raise ValueError(f"a weight {list(values.shape)}: not {list(self.shape)}")
        self.linear.put_groups(self.begin, values)

    def put_scaled(self, values: ScaledWeight) -> None:
        """Fills them with 8-bit floats. Raises ValueError for another shape."""
        if values.shape != self.shape:
            raise ValueError(f"a weight {list(values.shape)}: not {list(self.shape)}")
        self.linear.put_scaled(self.begin, values)
