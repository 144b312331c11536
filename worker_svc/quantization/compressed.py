"""compressed-tensors: groups of layers with their arguments, in several formats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from worker_svc.quantization import keys
from worker_svc.quantization.float8 import Float8Scheme, block_of
from worker_svc.quantization.integers import Int8Scheme, PackedScheme
from worker_svc.quantization.keys import WHERE
from worker_svc.quantization.scheme import PLAIN, Scheme, UnsupportedQuantization

FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
READ = {"quant_method", "format", "config_groups", "ignore", "quantization_status",
        "kv_cache_scheme"}  # fmt: skip
INERT = {"version"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sparsity_config": ({}, {"format": "dense"}),
    "transform_config": ({},),
}
GROUP_READ = {"targets", "weights", "input_activations", "format"}
ARGUMENTS_READ = {"num_bits", "type", "strategy", "group_size", "block_structure", "symmetric",
                  "dynamic", "actorder"}  # fmt: skip
# How scales were found, and the types that they are stored in, which the tensors say themselves.
ARGUMENTS_INERT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
# By weight's order of columns: whether the checkpoint says the group of each column.
ORDERS = {None: False, False: False, "weight": False, "static": False,
          True: True, "group": True, "dynamic": True}  # fmt: skip
CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class Compressed:
    """A checkpoint's settings: what is ignored, then the first group of layers that matches."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets and how they are stored
    ignored: tuple[str, ...]
    label: str
    kv_cache_dtype: str | None = None  # that its KV scales are for; None: it has none

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Compressed":
        """Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ, INERT, NEUTRAL)
        keys.one_of(WHERE, given, "quantization_status", ("compressed",), "compressed")
        found = given.get("config_groups")
        if not isinstance(found, dict) or not found:
            raise UnsupportedQuantization(f"{WHERE}.config_groups: {found!r} has no groups")
        groups, labels = [], []
        for name, group in found.items():
            where = f"{WHERE}.config_groups.{name}"
            if not isinstance(group, dict):
                raise UnsupportedQuantization(f"{where}: {group!r} is not an object")
            targets, scheme, label = _group(where, group, given.get("format"))
            groups.append((targets, scheme))
            labels.append(label)
        ignored = keys.names(WHERE, given, "ignore")
        _check_patterns(f"{WHERE}.ignore", ignored)
        label = f"compressed-tensors, {'; '.join(labels)}"
        return cls(tuple(groups), ignored, label, _kv_cache_dtype(given.get("kv_cache_scheme")))

    def scheme(self, name: str) -> Scheme:
        if any(_matches(name, pattern) for pattern in self.ignored):
            return PLAIN
        for is_exact in (True, False):  # a layer's own name is said of it, its class of all
            for targets, scheme in self.groups:
                named = [each for each in targets if (each != CLASS) == is_exact]
                if any(_matches(name, pattern) for pattern in named):
                    return scheme
        return PLAIN


def _matches(name: str, pattern: str) -> bool:
    """True if a pattern is the class, a regular expression from the start, or a layer's name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (CLASS, name)


def _check_patterns(where: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise UnsupportedQuantization(f"{where}: {pattern!r}: {error}") from None


def _group(
    where: str, group: Mapping[str, Any], whole: str | None
) -> tuple[tuple[str, ...], Scheme, str]:
    """Targets, scheme and label of a group of layers."""
    keys.check_keys(where, group, GROUP_READ, (), {"output_activations": ()})
    own = group.get("format") or (None if whole == "mixed-precision" else whole)
    form = keys.one_of(where, {"format": own}, "format", FORMATS)
    targets = keys.names(where, group, "targets")
    _check_patterns(f"{where}.targets", targets)
    weights = _arguments(f"{where}.weights", group.get("weights"))
    inputs = group.get("input_activations")
    is_static = inputs is not None and _is_static(f"{where}.input_activations", inputs)
    scheme, label = _scheme(f"{where}.weights", weights, form, is_static)
    if isinstance(scheme, Float8Scheme):
        scheme = replace(scheme, rounds_rows=inputs is not None)
    return targets, scheme, f"{form}, {label}"


def _arguments(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise UnsupportedQuantization(f"{where}: {given!r} is not an object")
    keys.check_keys(where, given, ARGUMENTS_READ, ARGUMENTS_INERT)
    return given


def _is_static(where: str, given: object) -> bool:
    """True if the checkpoint has a scale of a layer's inputs, of which 8 bits may be left.

    They keep their type here, which loses less; fewer bits are another model.
    """
    inputs = _arguments(where, given)
    keys.one_of(where, inputs, "num_bits", (8,))
    keys.one_of(where, inputs, "symmetric", (True,), True)
    return not keys.flag(where, inputs, "dynamic", False)


def _kv_cache_dtype(given: object) -> str | None:
    """The type in which keys and values are to be stored; None: it does not say."""
    if given is None:
        return None
    where = f"{WHERE}.kv_cache_scheme"
    scheme = _arguments(where, given)
    keys.one_of(where, scheme, "type", ("float",))
    keys.one_of(where, scheme, "num_bits", (8,))
    keys.one_of(where, scheme, "strategy", ("tensor", "attn_head"))
    keys.one_of(where, scheme, "dynamic", (False,), False)
    keys.one_of(where, scheme, "symmetric", (True,), True)
    for name in ("group_size", "block_structure", "actorder"):
        keys.one_of(where, scheme, name, (None,))
    return "fp8_e4m3"


def _scheme(
    where: str, weights: Mapping[str, Any], form: str, has_input_scale: bool
) -> tuple[Scheme, str]:
    kind = keys.one_of(where, weights, "type", ("int", "float"))
    is_symmetric = keys.flag(where, weights, "symmetric", True)
    keys.one_of(where, weights, "dynamic", (False,), False)
    strategy = keys.one_of(where, weights, "strategy", ("tensor", "channel", "group", "block"))
    if form == "pack-quantized":
        keys.one_of(where, weights, "type", ("int",))
        keys.one_of(where, weights, "strategy", ("channel", "group"))
        bits = keys.one_of(where, weights, "num_bits", (4, 8))
        group = keys.group_size(where, weights) if strategy == "group" else None
        order = keys.one_of(where, weights, "actorder", tuple(ORDERS))
        packed = PackedScheme(bits, group, is_symmetric, ORDERS[order])
        return packed, f"{bits} bits, {strategy} {group or ''}".strip()
    keys.one_of(where, weights, "num_bits", (8,))
    keys.one_of(where, weights, "actorder", (None, False))
    if form == "int-quantized" or kind == "int":
        keys.one_of(where, weights, "type", ("int",))
        keys.one_of(where, weights, "strategy", ("tensor", "channel"))
        return Int8Scheme(strategy == "channel", is_symmetric, has_input_scale), f"int8, {strategy}"
    keys.one_of(where, weights, "symmetric", (True,), True)
    keys.one_of(where, weights, "strategy", ("tensor", "channel", "block"))
    block: tuple[int | None, int | None] = (None, None) if strategy == "tensor" else (1, None)
    if strategy == "block":
        block = block_of(where, weights, "block_structure") or (128, 128)
    return Float8Scheme(block, has_input_scale=has_input_scale), f"fp8, {strategy}"
