"""Quantization of a plain checkpoint while it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.quantized.scaled import ScaledWeight
from worker_svc.quantization.gptq import LM_HEAD
from worker_svc.quantization.scheme import (
    MIN_CAPABILITY,
    PLAIN,
    Cut,
    Scheme,
    StoredWeight,
    TensorSpec,
)


@dataclass(frozen=True, slots=True)
class RoundedFloat8:
    """A plain weight rounded to 8-bit floats, with a scale for each output."""

    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        return PLAIN.tensors(num_outputs, num_inputs)

    def read(self, found: Mapping[str, Tensor], cut: Cut) -> StoredWeight:
        return ScaledWeight.rounded(found["weight"])


@dataclass(frozen=True, slots=True)
class Online:
    """The same scheme for all layers but the head."""

    label: str
    layer: Scheme

    def scheme(self, name: str) -> Scheme:
        return PLAIN if name == LM_HEAD else self.layer


ONLINE = {"fp8": Online("fp8 at load, channel", RoundedFloat8())}
