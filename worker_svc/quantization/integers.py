"""Integers of compressed-tensors: packed words of inputs, and plain int8."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.quantization.bits import WORD_BITS, Groups, unpacked
from worker_svc.quantization.float8 import INPUT_SCALE, SCALE
from worker_svc.quantization.scheme import (
    FLOATS,
    MIN_CAPABILITY,
    Axis,
    DamagedWeight,
    RankCut,
    StoredWeight,
    TensorSpec,
)

ZERO_POINT = "weight_zero_point"


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """`(q - z) s`: all are stored as if the lowest value were 0; zeros are packed by outputs."""

    bits: int
    group_size: int | None  # None: all inputs
    is_symmetric: bool
    has_order: bool  # whether the group of each input is stored
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        per_word = WORD_BITS // self.bits
        group = self.group_size or num_inputs
        if num_inputs % group:
            raise DamagedWeight(f"{SCALE}: groups of {group} do not divide {num_inputs} inputs")
        groups = num_inputs // group
        by_group = None if self.has_order or groups == 1 else Axis(1, group)
        int32 = (torch.int32,)
        specs = {
            "weight_packed": TensorSpec(
                (num_outputs, -(-num_inputs // per_word)), int32, Axis(0), Axis(1, per_word)
            ),
            SCALE: TensorSpec((num_outputs, groups), FLOATS, Axis(0), by_group, is_scale=True),
            "weight_shape": TensorSpec((2,), (torch.int64, torch.int32)),
        }
        if not self.is_symmetric:
            specs[ZERO_POINT] = TensorSpec(
                (-(-num_outputs // per_word), groups), int32, Axis(0, per_word), by_group
            )
        if self.has_order:
            specs["weight_g_idx"] = TensorSpec((num_inputs,), int32, None, Axis(0))
        return specs

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        """A grouped weight; a plain one where act-order scatters the groups."""
        if found["weight_shape"].tolist() != list(cut.whole):
            raise DamagedWeight(
                f"weight_shape: says {found['weight_shape'].tolist()}, expected {list(cut.whole)}"
            )
        num_outputs, num_inputs = cut.shape
        integers = unpacked(found["weight_packed"], self.bits, 1, num_inputs)
        if self.is_symmetric:
            zeros = torch.full(found[SCALE].shape, 1 << (self.bits - 1))
        else:
            zeros = unpacked(found[ZERO_POINT], self.bits, 0, num_outputs)
        groups = Groups(found[SCALE], zeros, self.bits)
        if not self.has_order:
            return groups.of(integers)
        size = self.group_size or cut.whole[1]
        return groups.by_index(integers, found["weight_g_idx"], "weight_g_idx", size)


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """`(q - z) s` with q and z in int8."""

    by_channel: bool
    is_symmetric: bool
    has_input_scale: bool = False  # checked, and not needed: activations keep their type
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        scales = (num_outputs, 1) if self.by_channel else (1,)
        outputs = Axis(0) if self.by_channel else None
        specs = {
            "weight": TensorSpec((num_outputs, num_inputs), (torch.int8,), Axis(0), Axis(1)),
            SCALE: TensorSpec(scales, FLOATS, outputs, is_scale=True),
        }
        if not self.is_symmetric:
            specs[ZERO_POINT] = TensorSpec(scales, (torch.int8,), outputs)
        if self.has_input_scale:
            specs[INPUT_SCALE] = TensorSpec((1,), FLOATS, is_scale=True)
        return specs

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        num_outputs = cut.shape[0]
        scales = found[SCALE].reshape(-1, 1).expand(num_outputs, 1)
        zeros = found.get(ZERO_POINT, torch.zeros(1, dtype=torch.int8)).reshape(-1, 1)
        # From -128..127 to 0..255.
        integers = found["weight"].view(torch.uint8) ^ 0x80
        return Groups(scales, zeros.expand(num_outputs, 1).short() + 0x80, 8).of(integers)
