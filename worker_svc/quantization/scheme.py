"""The interface of a quantization: its tensors, how a rank cuts them, and the weight they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight

# What a scheme reads; each stands for a weight [N, K].
StoredWeight = Tensor | GroupedWeight | ScaledWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MIN_CAPABILITY = 80  # of CUDA devices, major * 10 + minor: the first that multiply bfloat16


class UnsupportedQuantization(ValueError):
    """A setting or method is not supported; the message names it."""


class DamagedWeight(ValueError):
    """Tensors cannot be what they are said to be; the message begins with the tensor's suffix."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a tensor along the outputs, or the inputs, of its linear layer."""

    dim: int
    unit: int = 1  # outputs or inputs for each element along the dimension

    def cut(self, part: range, whole: int) -> slice:
        """The elements for these outputs or inputs. Raises DamagedWeight if one is divided."""
        if part.start % self.unit or (part.stop % self.unit and part.stop != whole):
            raise DamagedWeight(
                f"the part {part.start} to {part.stop} of a rank cuts a group of {self.unit}; "
                "a smaller tensor_parallel_size may not"
            )
        return slice(part.start // self.unit, -(-part.stop // self.unit))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a whole tensor, and the axes along which ranks cut it."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    outputs: Axis | None = None  # None: every rank reads all of them
    inputs: Axis | None = None
    is_scale: bool = False  # all values must be finite and above zero

    def of_matrices(self, count: int) -> "TensorSpec":
        """The tensor [count, N, K] that holds so many weights [N, K]."""
        return replace(self, shape=(count, *self.shape), outputs=Axis(1), inputs=Axis(2))


@dataclass(frozen=True, slots=True)
class RankCut:
    """The part of a weight [N, K] that a rank holds."""

    whole: tuple[int, int]
    outputs: range
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the part."""
        return len(self.outputs), len(self.inputs)


class Scheme(Protocol):
    """The form in which the weight of one linear layer is stored."""

    @property
    def min_capability(self) -> int:
        """The least compute capability of a CUDA device for it, major * 10 + minor."""

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        """The tensors of a weight [N, K] by suffix; raises DamagedWeight if none can hold it."""

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        """The part of the weight in these parts of the tensors. Raises DamagedWeight."""


class Quantization(Protocol):
    """The settings of a checkpoint for each of its linear layers."""

    @property
    def label(self) -> str:
        """Method and format in a few words."""

    def scheme(self, name: str) -> Scheme:
        """The form in which the linear layer of this name is stored."""


class Plain:
    """A weight that is not quantized."""

    min_capability = 0

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        shape = (num_outputs, num_inputs)
        return {"weight": TensorSpec(shape, FLOATS, Axis(0), Axis(1))}

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        return found["weight"]


PLAIN = Plain()
