"""Reads adapter_config.json of a PEFT folder: ranks and scales of an adapter's modules.

A key that would change what is computed, and is not read here, is refused by its name: an adapter
is served as it was trained, or not at all. It knows no tensors.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker_svc.adapters.errors import BadAdapter

# Keys that say how the adapter was made, and nothing of how it computes.
_INERT = {
    "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_READ = {"alpha_pattern", "bias", "lora_alpha", "r", "rank_pattern", "use_rslora"}
# Initializations that change the weights of the model, too: the adapter is for the changed ones.
_CHANGES_MODEL = ("corda", "lora_ga", "loftq", "olora", "pissa")
_MOST_PATTERN = 256  # characters of a pattern
_MOST_REPEATS = 3  # `*`, `+` and `{` in one


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The rank and the scale of each module of an adapter."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[re.Pattern[str], float], ...] = ()  # by pattern of a module's name
    alphas: tuple[tuple[re.Pattern[str], float], ...] = ()
    modules: tuple[str, ...] = ()  # the last parts of names, where the configuration lists them

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor on a module's B A x."""
        rank, alpha = self.rank_of(module), _matching(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def parse(content: bytes) -> PeftConfig:
    """The configuration in a file's content. Raises BadAdapter, naming the key."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"adapter_config.json: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadAdapter("adapter_config.json: is no object")
    _refuse(found)
    listed = found.get("target_modules")
    return PeftConfig(
        rank=_rank("r", found.get("r")),
        alpha=_number("lora_alpha", found.get("lora_alpha")),
        is_rank_stabilized=_flag(found, "use_rslora"),
        ranks=_patterns(found, "rank_pattern", _rank),
        alphas=_patterns(found, "alpha_pattern", _number),
        modules=tuple(map(str, listed)) if isinstance(listed, list) else (),
    )


def _refuse(found: Mapping[str, Any]) -> None:
    """Raises BadAdapter for what is not computed here."""
    if found.get("peft_type") != "LORA":
        raise BadAdapter(f"peft_type: {found.get('peft_type')!r} is not supported, LORA is")
    if _flag(found, "use_dora"):
        raise BadAdapter("use_dora: DoRA is not supported: it norms the model's own weights")
    if found.get("modules_to_save"):
        raise BadAdapter("modules_to_save: whole modules are not supported, LoRA's matrices are")
    if found.get("bias", "none") != "none":
        raise BadAdapter(f"bias: {found['bias']!r} is not supported, 'none' is")
    how = found.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_MODEL):
        raise BadAdapter(
            f"init_lora_weights: {how!r} changes the model's weights, too; convert the adapter to "
            "plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    for key, value in found.items():
        # A value that asks for nothing is no reason, whatever the key.
        if value and key not in _INERT | _READ:
            raise BadAdapter(f"{key}: {value!r} is not supported")


def _flag(found: Mapping[str, Any], key: str) -> bool:
    value = found.get(key, False)
    if value not in (True, False, None):
        raise BadAdapter(f"{key}: {value!r} is neither true nor false")
    return bool(value)


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadAdapter(f"{name}: {value!r} is no rank")
    return value


def _number(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise BadAdapter(f"{name}: {value!r} is no finite number")
    return float(value)  # type: ignore[arg-type]


def _patterns(
    found: Mapping[str, Any], key: str, read: Callable[[str, object], float]
) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Compiled patterns with their values, in the order of the file: the first match holds."""
    given = found.get(key) or {}
    if not isinstance(given, dict):
        raise BadAdapter(f"{key}: is no object")
    return tuple((_compiled(key, text), read(f"{key}.{text}", one)) for text, one in given.items())


def _compiled(key: str, pattern: str) -> re.Pattern[str]:
    """A pattern for the end of a module's name, as PEFT matches it.

    One that could keep the process busy is refused: a repeated group, or many repeats.
    """
    repeats = sum(pattern.count(sign) for sign in "*+{")
    is_slow = repeats > _MOST_REPEATS or re.search(r"\)[*+{?]", pattern) is not None
    if len(pattern) > _MOST_PATTERN or is_slow:
        raise BadAdapter(f"{key}: {pattern[:_MOST_PATTERN]!r} is too complex a pattern")
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except re.error as error:
        raise BadAdapter(f"{key}: {pattern!r} is no pattern: {error}") from None


def _matching(
    patterns: tuple[tuple[re.Pattern[str], float], ...], module: str, default: float
) -> float:
    return next((value for one, value in patterns if one.fullmatch(module)), default)
