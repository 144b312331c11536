"""GPTQ: words of inputs, and a group index for each input."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.quantization import keys
from worker_svc.quantization.bits import WORD_BITS, Groups, unpacked
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

READ = {"quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", LM_HEAD,
        "format", "modules_to_not_convert"}  # fmt: skip
# How the weights were found, and kernels of other engines.
INERT = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "mse", "pad_token_id", "quantizer", "static_groups",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adapter": ({},),
    "dynamic": ({},),  # other settings for some layers
    "is_marlin_format": (False,),
    "modules_in_block_to_quantize": ([],),
    "pack_dtype": ("int32",),
    "rotation": (),
}
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """`(q - z) s`, where version 1 stores z - 1; input k is in group `g_idx[k]`."""

    bits: int
    group_size: int | None  # None: all inputs
    desc_act: bool
    zero_offset: int
    min_capability: int = MIN_CAPABILITY

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        per_word = WORD_BITS // self.bits
        group = self.group_size or num_inputs
        if num_inputs % per_word or num_outputs % per_word:
            raise DamagedWeight(
                f"qweight: [{num_outputs}, {num_inputs}] does not divide into words of {per_word}"
            )
        if num_inputs % group:
            raise DamagedWeight(f"scales: groups of {group} do not divide {num_inputs} inputs")
        groups = num_inputs // group
        # With act-order a rank's inputs may be of any group, so it reads all of them.
        by_group = None if self.desc_act or groups == 1 else Axis(0, group)
        word = (torch.int32,)
        return {
            "qweight": TensorSpec(
                (num_inputs // per_word, num_outputs), word, Axis(1), Axis(0, per_word)
            ),
            "qzeros": TensorSpec(
                (groups, num_outputs // per_word), word, Axis(1, per_word), by_group
            ),
            "scales": TensorSpec((groups, num_outputs), FLOATS, Axis(1), by_group, is_scale=True),
            "g_idx": TensorSpec((num_inputs,), word, None, Axis(0)),
        }

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        """A grouped weight; a plain one where act-order scatters the groups."""
        integers = unpacked(found["qweight"], self.bits, 0).t()
        zeros = unpacked(found["qzeros"], self.bits, 1).short() + self.zero_offset
        groups = Groups(found["scales"].t(), (zeros & ((1 << self.bits) - 1)).t(), self.bits)
        group, index = self.group_size or cut.whole[1], found["g_idx"]
        if self.desc_act:
            return groups.by_index(integers, index, "g_idx", group)
        if not torch.equal(index.long(), torch.tensor(cut.inputs) // group):
            raise DamagedWeight("g_idx: groups are not in order although desc_act is false")
        return groups.of(integers)


@dataclass(frozen=True, slots=True)
class Gptq:
    """A checkpoint's settings."""

    layer: GptqScheme
    has_head: bool  # whether the LM head is quantized, too
    kept: tuple[str, ...]  # layers that are not

    @property
    def label(self) -> str:
        group = "channel" if self.layer.group_size is None else f"group {self.layer.group_size}"
        order = ", act-order" if self.layer.desc_act else ""
        return f"gptq, {self.layer.bits} bits, {group}{order}"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Gptq":
        """Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ, INERT, NEUTRAL)
        named = {given.get(name) for name in ("checkpoint_format", "format")} - {None}
        if len(named) > 1 or not named <= set(FORMATS):
            raise UnsupportedQuantization(
                f"{WHERE}.checkpoint_format: {sorted(map(str, named))} is not supported; "
                f"supported are {', '.join(FORMATS)}"
            )
        is_second = named == {"gptq_v2"}
        keys.flag(WHERE, given, "sym", True)  # both store zeros
        layer = GptqScheme(
            keys.one_of(WHERE, given, "bits", (4, 8)),
            keys.group_size(WHERE, given),
            keys.flag(WHERE, given, "desc_act", False),
            0 if is_second else 1,
        )
        has_head = keys.flag(WHERE, given, LM_HEAD, False)
        return cls(layer, has_head, keys.names(WHERE, given, "modules_to_not_convert"))

    def scheme(self, name: str) -> Scheme:
        is_kept = (name == LM_HEAD and not self.has_head) or keys.is_part(name, self.kept)
        return PLAIN if is_kept else self.layer
