"""8-bit floats: scales by tensor, by channel or by block, whatever they are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized.scaled import FLOAT8, ScaledWeight
from worker_svc.quantization import keys
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
    UnsupportedQuantization,
)

Block = tuple[int, int]  # outputs, inputs
READ = {"quant_method", "method", "activation_scheme", "fmt", "weight_block_size",
        "modules_to_not_convert", "ignored_layers"}  # fmt: skip
INERT = {"scale_fmt"}  # how the scales were rounded
FORMATS = ("e4m3", "float8_e4m3fn")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "act_bits": (8, 16),  # `activation_scheme` says how
    "bits": (8,),
    "checkpoint_format": FORMATS,
    "data_type": ("fp8", "fp8_e4m3"),
    "desc_act": (False,),
    "dynamic": ({},),
    "format": FORMATS,
    "group_size": (-1,),
    "is_checkpoint_fp8_serialized": (True,),
    "kv_cache_scheme": (),
    LM_HEAD: (False,),
    "modules_to_convert": (),
    "weight_scale_method": (),
    "weight_scale_semantics": (),
}
SCALE, BLOCK_SCALE, INPUT_SCALE = "weight_scale", "weight_scale_inv", "input_scale"


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """Values times scales. `block` outputs and inputs share one; None: all of that dimension."""

    block: tuple[int | None, int | None]
    scale_name: str = SCALE
    has_input_scale: bool = False  # checked, and not needed: a row's own scale is used
    rounds_rows: bool = True  # the checkpoint is made for activations in 8 bits
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        rows, columns = self.block
        if (rows, columns) == (None, None):
            scales: tuple[int, ...] = (1,)
        else:
            scales = (
                -(-num_outputs // (rows or num_outputs)),
                -(-num_inputs // (columns or num_inputs)),
            )
        specs = {
            "weight": TensorSpec((num_outputs, num_inputs), (FLOAT8,), Axis(0), Axis(1)),
            self.scale_name: TensorSpec(
                scales,
                FLOATS,
                None,  # a block's scale is repeated for each output, so any cut is exact
                None if columns is None else Axis(1, columns),
                is_scale=True,
            ),
        }
        if self.has_input_scale:
            specs[INPUT_SCALE] = TensorSpec((1,), FLOATS, is_scale=True)
        return specs

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        values, scales = found["weight"], found[self.scale_name].float()
        if bool(torch.isnan(values.float()).any()):
            raise DamagedWeight("weight: has a value that is not a number")
        rows, columns = self.block
        by_block = scales.reshape(1, 1) if scales.ndim == 1 else scales
        at = torch.tensor(cut.outputs) // (rows or cut.whole[0])
        group = columns or cut.shape[1]
        return ScaledWeight(values, by_block[at].contiguous(), group, self.rounds_rows)


@dataclass(frozen=True, slots=True)
class Float8:
    """Settings of a checkpoint with `quant_method` fp8."""

    layer: Float8Scheme
    kept: tuple[str, ...]  # layers that are not quantized

    @property
    def label(self) -> str:
        rows, columns = self.layer.block
        return "fp8, tensor" if rows is None else f"fp8, block {rows}x{columns}"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Float8":
        """Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ, INERT, NEUTRAL)
        keys.one_of(WHERE, given, "fmt", FORMATS, "e4m3")
        schemes = ("dynamic", "static")
        is_static = keys.one_of(WHERE, given, "activation_scheme", schemes, "dynamic") == "static"
        kept = (
            *keys.names(WHERE, given, "modules_to_not_convert"),
            *keys.names(WHERE, given, "ignored_layers"),
        )
        block = block_of(WHERE, given, "weight_block_size")
        if block is None:
            return cls(Float8Scheme((None, None), SCALE, is_static), kept)
        return cls(Float8Scheme(block, BLOCK_SCALE, is_static), kept)

    def scheme(self, name: str) -> Scheme:
        return PLAIN if keys.is_head(name) or keys.is_part(name, self.kept) else self.layer


def block_of(where: str, given: Mapping[str, Any], name: str) -> Block | None:
    """Outputs and inputs of a block; None where null. Raises UnsupportedQuantization."""
    value = given.get(name)
    if value is None:
        return None
    are_sizes = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
    if not are_sizes or len(value) != 2:
        raise UnsupportedQuantization(f"{where}.{name}: {value!r} is not two positive sizes")
    return value[0], value[1]
