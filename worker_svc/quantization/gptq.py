"""GPTQ: words of inputs, and a group index for each input."""

import re
from collections.abc import Iterator, Mapping
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

READ = {"quant_method", "method", "bits", "group_size", "desc_act", "sym", "checkpoint_format",
        LM_HEAD, "format", "dynamic", "modules_in_block_to_quantize",
        "modules_to_not_convert"}  # fmt: skip
READ_OF_LAYERS = {"bits", "group_size", "desc_act", "sym"}
NEUTRAL: dict[str, tuple[Any, ...]] = {"data_type": ("int",)}
EXCLUDED, INCLUDED = "-:", "+:"  # before a pattern of `dynamic`
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
class LayerRule:
    """A scheme for layers whose names a regular expression matches from the start."""

    pattern: re.Pattern[str]
    layer: Scheme


@dataclass(frozen=True, slots=True)
class Gptq:
    """A checkpoint's settings."""

    layer: GptqScheme
    has_head: bool  # whether the LM head is quantized, too
    kept: tuple[str, ...]  # layers that are not
    parts: tuple[str, ...] = ()  # of each block that are quantized; empty: all
    rules: tuple[LayerRule, ...] = ()  # for single layers; the first that matches holds

    @property
    def label(self) -> str:
        group = "channel" if self.layer.group_size is None else f"group {self.layer.group_size}"
        order = ", act-order" if self.layer.desc_act else ""
        rules = f", {len(self.rules)} rules for layers" if self.rules else ""
        return f"gptq, {self.layer.bits} bits, {group}{order}{rules}"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Gptq":
        """Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ, neutral=NEUTRAL)
        named = {given.get(name) for name in ("checkpoint_format", "format")} - {None}
        if len(named) > 1 or not named <= set(FORMATS):
            raise UnsupportedQuantization(
                f"{WHERE}.checkpoint_format: {sorted(map(str, named))} is not supported; "
                f"supported are {', '.join(FORMATS)}"
            )
        layer = _layer(WHERE, given, 0 if named == {"gptq_v2"} else 1)
        return cls(
            layer,
            keys.flag(WHERE, given, LM_HEAD, False),
            keys.names(WHERE, given, "modules_to_not_convert"),
            _parts(given.get("modules_in_block_to_quantize")),
            tuple(_rules(given.get("dynamic"), given, layer.zero_offset)),
        )

    def scheme(self, name: str) -> Scheme:
        if (keys.is_head(name) and not self.has_head) or keys.is_part(name, self.kept):
            return PLAIN
        if self.parts and not keys.is_head(name) and not name.endswith(self.parts):
            return PLAIN
        matching = (rule.layer for rule in self.rules if rule.pattern.match(name))
        return next(matching, self.layer)


def _layer(where: str, given: Mapping[str, Any], zero_offset: int) -> GptqScheme:
    keys.flag(where, given, "sym", True)  # both store zeros
    return GptqScheme(
        keys.one_of(where, given, "bits", (4, 8)),
        keys.group_size(where, given),
        keys.flag(where, given, "desc_act", False),
        zero_offset,
    )


def _parts(given: object) -> tuple[str, ...]:
    """Ends of names of the layers in `modules_in_block_to_quantize`, which has lists of lists."""
    where = f"{WHERE}.modules_in_block_to_quantize"
    groups = [] if given is None else given
    if not isinstance(groups, list):
        raise UnsupportedQuantization(f"{where}: {given!r} is not a list")
    found = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    if not all(isinstance(name, str) for name in found):
        raise UnsupportedQuantization(f"{where}: {given!r} has an entry that is no name")
    return tuple(dict.fromkeys(f".{name}" for name in found))


def _rules(given: object, base: Mapping[str, Any], zero_offset: int) -> Iterator[LayerRule]:
    """The rules of `dynamic`: its keys are patterns of layers, its values change settings."""
    where = f"{WHERE}.dynamic"
    if given is not None and not isinstance(given, dict):
        raise UnsupportedQuantization(f"{where}: {given!r} is not an object")
    for name, changes in (given or {}).items():
        place = f"{where}.{name}"
        if not isinstance(changes, dict):
            raise UnsupportedQuantization(f"{place}: {changes!r} is not an object")
        try:
            pattern = re.compile(name.removeprefix(EXCLUDED).removeprefix(INCLUDED))
        except re.error as error:
            raise UnsupportedQuantization(f"{place}: {error}") from None
        if name.startswith(EXCLUDED):
            yield LayerRule(pattern, PLAIN)
            continue
        keys.check_keys(place, changes, READ_OF_LAYERS)
        yield LayerRule(pattern, _layer(place, {**base, **changes}, zero_offset))
