"""Reads a model's config.json and refuses unsupported settings, naming the field.

Both forms are read: `torch_dtype`, `rope_theta`, `rope_scaling` (transformers 4) and `dtype`,
`rope_parameters` (transformers 5).
"""

import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pagewire.gguf.files import file_in, is_gguf, read_file
from pagewire.gguf.header import BadGguf
from worker_svc.models import config_keys
from worker_svc.models.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    Scaling,
    YarnScaling,
)
from worker_svc.quantization import registry
from worker_svc.quantization.gguf import GgufTypes
from worker_svc.quantization.scheme import Quantization, UnsupportedQuantization

ARCHITECTURES = {  # and the model_type of each
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Where `sliding_window` says nothing without `use_sliding_window`, which is refused.
USE_SLIDING_WINDOW = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
ORIGINAL_LENGTH = "original_max_position_embeddings"
HAVE_ORIGINAL_LENGTH = ("llama3", "longrope", "yarn")
SCALINGS: dict[str, type[Scaling]] = {
    "dynamic": DynamicScaling,
    "factors": FactorScaling,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "longrope": LongRopeScaling,
    "yarn": YarnScaling,
}

log = logging.getLogger(__name__)

WANTED = "a model is a Hugging Face folder with config.json and safetensors, or a GGUF file"


class UnsupportedModel(ValueError):
    """The model is not supported; the message names the field."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RotaryConfig
    max_position_embeddings: int
    sliding_window: int | None  # in tokens; None: attention over all tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # None: the weights are plain numbers

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, after YaRN scaling."""
        scaling = self.rope.scaling
        if isinstance(scaling, YarnScaling):
            stretched = int(scaling.factor * scaling.original_max_position_embeddings)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    def check_length(self, max_model_len: int) -> None:
        """Raises UnsupportedModel for a length above the model's limit or its sliding window."""
        if not 1 <= max_model_len <= self.max_model_len:
            raise UnsupportedModel(
                f"max_model_len: {max_model_len} is not in 1..{self.max_model_len}, "
                "the model's own limit"
            )
        if self.sliding_window is not None and self.sliding_window < max_model_len:
            raise UnsupportedModel(
                f"sliding_window: attention over the last {self.sliding_window} tokens is not "
                f"supported; a max_model_len of at most {self.sliding_window} (now "
                f"{max_model_len}) needs none"
            )


def load(
    folder: Path, ignored_keys: Collection[str] = (), quantization: str = "auto"
) -> ModelConfig:
    """Reads the configuration of a Hugging Face folder or a GGUF file. Raises UnsupportedModel.

    Every key of config.json must be known and served, apart from `ignored_keys`. `quantization`
    other than "auto" is that of plain weights while they are loaded.
    """
    if not folder.is_dir() and not is_gguf(folder):
        raise UnsupportedModel(f"model: {folder} is not a folder; {WANTED}")
    raw = read_json(folder, CONFIG)
    if raw is None:
        raise UnsupportedModel(f"{folder / CONFIG} does not exist; {WANTED}")
    defaults = read_json(folder, GENERATION_CONFIG) or {}
    architecture = _architecture(raw)
    _refuse_variants(raw, architecture, ignored_keys)
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads: {num_kv_heads} does not divide {num_heads} attention heads"
        )
    head_dim = _head_dim(raw, num_heads)
    has_bias = _flag(raw, "attention_bias")
    is_llama, is_qwen2, is_qwen3 = (
        architecture == f"{family}ForCausalLM" for family in ("Llama", "Qwen2", "Qwen3")
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=_positive(raw, "hidden_size"),
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(_required(raw, "rms_norm_eps")),
        rope=_check_pairs(_rotary(raw, ignored_keys), head_dim),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        sliding_window=_sliding_window(raw, architecture),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=is_qwen2 or (has_bias and (is_llama or is_qwen3)),
        o_bias=has_bias and (is_llama or is_qwen3),
        mlp_bias=is_llama and _flag(raw, "mlp_bias"),
        qk_norm=is_qwen3,
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids(raw, defaults, _positive(raw, "vocab_size")),
        quantization=_quantization(folder, raw, quantization, ignored_keys),
    )


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The content of a file of the model; None: it has none of this name."""
    path = file_in(folder, name)
    try:
        text = read_file(folder, name)
        content = None if text is None else json.loads(text)
    except BadGguf as error:
        raise UnsupportedModel(str(error)) from None
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if text is not None and not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return content


def _required(raw: Mapping[str, Any], name: str) -> Any:
    value = raw.get(name)
    if value is None:
        raise UnsupportedModel(f"config.json: {name} is missing")
    return value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(f"config.json: {name} is {value!r}, neither true nor false")
    return bool(value)


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if default is not None and raw.get(name) is None else _required(raw, name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} is {value!r}, not a positive integer")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architectures: {names!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(names[0])


def _refuse_variants(
    raw: Mapping[str, Any], architecture: str, ignored_keys: Collection[str]
) -> None:
    model_type = raw.get("model_type")
    if model_type not in (None, ARCHITECTURES[architecture]):
        raise UnsupportedModel(f"model_type: {model_type!r} is not that of {architecture}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act: {activation!r} is not supported, only 'silu' is")
    if raw.get("use_sliding_window") and architecture in USE_SLIDING_WINDOW:
        raise UnsupportedModel("use_sliding_window: attention over a window is not supported")
    for kind in raw.get("layer_types") or ():
        if kind != config_keys.FULL_ATTENTION:
            raise UnsupportedModel(f"layer_types: {kind!r} is not supported")
    if (reason := config_keys.refusal(raw, architecture, ignored_keys)) is not None:
        raise UnsupportedModel(reason)


def _head_dim(raw: Mapping[str, Any], num_heads: int) -> int:
    hidden_size = _positive(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(
            f"hidden_size: {hidden_size} is no multiple of {num_heads} heads; head_dim is absent"
        )
    head_dim = _positive(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim: {head_dim} is odd, and rotation pairs dimensions")
    return head_dim


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    if architecture in USE_SLIDING_WINDOW:
        return None
    if architecture != "MistralForCausalLM" and raw.get("use_sliding_window") is False:
        return None
    # A Mistral config without this field means the window of the first Mistral model.
    window = raw.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    if window is None:
        return None
    if not isinstance(window, int | float) or window < 1:
        raise UnsupportedModel(f"config.json: sliding_window is {window!r}, not a positive integer")
    return int(window)


def _rotary(raw: Mapping[str, Any], ignored: Collection[str]) -> RotaryConfig:
    """The rotary embedding, from one field (transformers 5) or from two (transformers 4)."""
    given = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    read = [_rotary_in(raw, name, ignored) for name in given or ["rope_scaling"]]
    if any(other.scaling != read[0].scaling for other in read):
        raise UnsupportedModel("rope_scaling: differs from rope_parameters, and only one can hold")
    return read[0]


def _rotary_in(raw: Mapping[str, Any], where: str, ignored: Collection[str]) -> RotaryConfig:
    value = raw.get(where) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {where} is {value!r}, not an object")
    given = dict(value)
    theta = float(given.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    partial = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor: {partial} is not supported, only 1 is")
    if kind != "default" and kind not in SCALINGS:
        raise UnsupportedModel(
            f"{where}: rope_type {kind!r} is not supported; "
            f"supported are default, {', '.join(SCALINGS)}"
        )
    if kind in HAVE_ORIGINAL_LENGTH:
        _set_original_length(raw, kind, given)
    return RotaryConfig(theta, _scaling(where, kind, given, ignored))


def _set_original_length(raw: Mapping[str, Any], kind: str, given: dict[str, Any]) -> None:
    """Sets the length that the model was made for, and what follows from it, as transformers does.

    The key of config.json itself goes before that of the scaling.
    """
    longest, original = raw.get("max_position_embeddings"), raw.get(ORIGINAL_LENGTH)
    if original is not None:
        given[ORIGINAL_LENGTH] = original
    elif kind != "llama3" and given.get(ORIGINAL_LENGTH) is None:
        given[ORIGINAL_LENGTH] = longest
    original = given.get(ORIGINAL_LENGTH)
    if original is not None and (type(original) is not int or original < 2):
        raise UnsupportedModel(f"{ORIGINAL_LENGTH}: {original!r} is not an integer above 1")
    if kind == "longrope" and given.get("factor") is None and isinstance(longest, int):
        given["factor"] = longest / given[ORIGINAL_LENGTH]


def _scaling(
    where: str, kind: str, given: Mapping[str, Any], ignored: Collection[str]
) -> Scaling | None:
    known = {field.name: field for field in fields(SCALINGS[kind])} if kind in SCALINGS else {}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    for name in [name for name in values if name not in known]:
        path = f"{where}.{name}"
        if path not in ignored:
            raise UnsupportedModel(
                f"{where}: {name} is not supported with rope_type {kind!r}; if it changes nothing, "
                f"give --ignore-config-keys {path}"
            )
        config_keys.tell_ignored(path)
        del values[name]
    for name, value in values.items():
        _check_scaling(f"{where}.{name}", value)
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise UnsupportedModel(f"{where}: {name} is missing for rope_type {kind!r}")
    return SCALINGS[kind](**values) if kind in SCALINGS else None


def _check_scaling(path: str, value: object) -> None:
    """Raises UnsupportedModel for what is no number, or a factor that is not above zero."""
    is_switch = path.endswith(".truncate")
    if is_switch and isinstance(value, bool):
        return
    for number in value if isinstance(value, tuple) else (value,):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_switch or not is_number or not math.isfinite(number):
            raise UnsupportedModel(f"{path}: {number!r} cannot be served")
        if number <= 0 and "factor" in path:
            raise UnsupportedModel(f"{path}: {number!r} is not above 0")


def _check_pairs(rope: RotaryConfig, head_dim: int) -> RotaryConfig:
    """Raises UnsupportedModel unless there is a factor for each pair of dimensions."""
    for name in ("factors", "short_factor", "long_factor"):
        factors = getattr(rope.scaling, name, None)
        if isinstance(factors, tuple) and len(factors) != head_dim // 2:
            raise UnsupportedModel(
                f"rope_scaling.{name}: has {len(factors)} factors for {head_dim // 2} pairs of "
                "dimensions"
            )
    return rope


def _quantization(
    folder: Path, raw: Mapping[str, Any], asked: str, ignored: Collection[str]
) -> Quantization | None:
    try:
        if is_gguf(folder):
            return registry.chosen(asked, GgufTypes.of(folder))
        stored = registry.of_checkpoint(raw.get("quantization_config"), ignored=ignored)
        return registry.chosen(asked, stored)
    except UnsupportedQuantization as error:
        raise UnsupportedModel(str(error)) from None


def eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """EOS ids of the generation config, which include those of chat turns; else of config.json.

    What is no id of the vocabulary can end no output: it is dropped, with a warning in the log.
    """
    for name, source in ((GENERATION_CONFIG, generation), (CONFIG, raw)):
        given = source.get("eos_token_id")
        if given is None:
            continue
        entries = given if isinstance(given, list) else [given]
        ids = [entry for entry in entries if type(entry) is int and 0 <= entry < vocab_size]
        if len(ids) < len(entries):
            strange = config_keys.short([entry for entry in entries if entry not in ids])
            log.warning("%s: eos_token_id: %s: no ids of the vocabulary", name, strange)
        if ids or not entries:
            return tuple(dict.fromkeys(ids))
    return ()
