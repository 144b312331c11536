"""Quantization of a plain checkpoint while it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.quantized.rounding import quantized
from kernels.quantized.scaled import ScaledWeight
from worker_svc.quantization.keys import is_head
from worker_svc.quantization.scheme import (
    MIN_CAPABILITY,
    PLAIN,
    DamagedWeight,
    Quantization,
    RankCut,
    Scheme,
    StoredWeight,
    TensorSpec,
)

# Two numbers a head, by which a delta net's states decay and are written: few bytes, and an error
# in them stays in the state.
STEPS = ("in_proj_a", "in_proj_b", "in_proj_ba")
GROUP = 32  # columns that share a scale and a zero point


@dataclass(frozen=True, slots=True)
class RoundedFloat8:
    """A plain weight rounded to 8-bit floats, with a scale for each output."""

    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        return PLAIN.tensors(num_outputs, num_inputs)

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        return ScaledWeight.rounded(found["weight"])


@dataclass(frozen=True, slots=True)
class RoundedIntegers:
    """A plain weight rounded to integers in groups of columns."""

    bits: int
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        return PLAIN.tensors(num_outputs, num_inputs)

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        """Raises DamagedWeight if groups do not divide the inputs, or a number is not finite."""
        if cut.inputs.start % GROUP or len(cut.inputs) % GROUP:
            part = f"{cut.inputs.start} to {cut.inputs.stop}"
            raise DamagedWeight(f"weight: groups of {GROUP} do not divide inputs {part}")
        try:
            return quantized(found["weight"], self.bits, GROUP)
        except ValueError as error:
            raise DamagedWeight(str(error)) from None


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rule by which float numbers become integers."""

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Online:
    """The one scheme of all layers but the head and `STEPS`, which are loaded as they are."""

    label: str
    layer: Scheme
    head: Rounding | None = None  # where the C kernels multiply it

    def scheme(self, name: str) -> Scheme:
        is_kept = is_head(name) or name.rpartition(".")[2] in STEPS
        return PLAIN if is_kept else self.layer


HEAD = Rounding(8, GROUP)
ONLINE = {
    "fp8": Online("fp8 at load, channel", RoundedFloat8()),
    "int8": Online(f"int8 at load, group {GROUP}", RoundedIntegers(8), HEAD),
    "int4": Online(f"int4 at load, group {GROUP}", RoundedIntegers(4), HEAD),
}


def head_rounding(quantization: Quantization | None) -> Rounding | None:
    """The rule by which the C kernels round a head of float numbers; None: not at all."""
    return quantization.head if isinstance(quantization, Online) else None
