"""AWQ: words of outputs, in an order of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.quantization import keys
from worker_svc.quantization.bits import Groups, unpacked
from worker_svc.quantization.keys import LM_HEAD, WHERE
from worker_svc.quantization.scheme import (
    FLOATS,
    MIN_CAPABILITY,
    PLAIN,
    Axis,
    DamagedWeight,
    RankCut,
    Scheme,
    StoredWeight,
    TensorSpec,
)

BITS, PER_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0, 1, 2 ... in a word

READ = {"quant_method", "method", "bits", "group_size", "zero_point", "version", "format",
        "checkpoint_format", "modules_to_not_convert"}  # fmt: skip
INERT = {"sym"}  # zeros are stored and read either way
# Of GPTQ, whose keys some writers give, too.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_type": ("int",),
    "desc_act": (False,),
    "dynamic": ({},),
    LM_HEAD: (False,),
    "modules_in_block_to_quantize": ([],),
}
FORMATS = ("gemm", "GEMM")


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """`(q - z) s`."""

    group_size: int | None  # None: all inputs
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        group = self.group_size or num_inputs
        if num_outputs % PER_WORD:
            raise DamagedWeight(f"qweight: {num_outputs} outputs are no multiple of {PER_WORD}")
        if num_inputs % group:
            raise DamagedWeight(f"scales: groups of {group} do not divide {num_inputs} inputs")
        groups, words = num_inputs // group, num_outputs // PER_WORD
        packed, int32 = Axis(1, PER_WORD), (torch.int32,)
        by_group = Axis(0, group) if groups > 1 else None
        return {
            "qweight": TensorSpec((num_inputs, words), int32, packed, Axis(0)),
            "qzeros": TensorSpec((groups, words), int32, packed, by_group),
            "scales": TensorSpec((groups, num_outputs), FLOATS, Axis(1), by_group, is_scale=True),
        }

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        integers, zeros = _in_order(found["qweight"]).t(), _in_order(found["qzeros"]).t()
        return Groups(found["scales"].t(), zeros, BITS).of(integers)


def _in_order(words: Tensor) -> Tensor:
    """[rows, N / 8] -> [rows, N]."""
    elements = unpacked(words, BITS, 1).reshape(*words.shape, PER_WORD)
    return elements[..., torch.tensor(PLACES)].flatten(1)


@dataclass(frozen=True, slots=True)
class Awq:
    """A checkpoint's settings."""

    layer: AwqScheme
    kept: tuple[str, ...]  # layers that are not quantized

    @property
    def label(self) -> str:
        group = "channel" if self.layer.group_size is None else f"group {self.layer.group_size}"
        return f"awq, {BITS} bits, {group}"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Awq":
        """Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ, INERT, NEUTRAL)
        keys.one_of(WHERE, given, "bits", (BITS,))
        for name in ("version", "format", "checkpoint_format"):
            keys.one_of(WHERE, given, name, FORMATS, "gemm")
        keys.flag(WHERE, given, "zero_point", True)  # without them, equal ones are stored
        kept = keys.names(WHERE, given, "modules_to_not_convert")
        return cls(AwqScheme(keys.group_size(WHERE, given)), kept)

    def scheme(self, name: str) -> Scheme:
        return PLAIN if keys.is_head(name) or keys.is_part(name, self.kept) else self.layer
