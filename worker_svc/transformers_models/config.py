"""Reads a model's config.json as transformers does, and refuses what would not be computed."""

import difflib
import inspect
import logging
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.gguf.architecture import architecture_of
from pagewire.gguf.files import is_gguf
from pagewire.gguf.header import read_header
from worker_svc.models.config import (
    CONFIG,
    GENERATION_CONFIG,
    eos_token_ids,
    read_json,
)
from worker_svc.models.config_keys import INERT, LOGITS, NEUTRAL, tell_ignored
from worker_svc.models.config_rope import ORIGINAL_LENGTH
from worker_svc.models.spec import UnsupportedModel
from worker_svc.quantization import registry
from worker_svc.quantization.scheme import Quantization, UnsupportedQuantization

log = logging.getLogger(__name__)

MXFP4 = "mxfp4"  # read by the library, as the numbers that it stands for
# Rotations whose frequencies depend on the longest position of a call.
_BY_LENGTH = ("dynamic", "longrope")
# Keys of a configuration that say how it was written, or what its text is made of.
_WRITTEN = {
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "quantization_config",
}
_SERVED_KINDS = {
    "attention",
    "chunked_attention",
    "conv",
    "full_attention",
    "linear_attention",
    "mamba",
    "mlp",
    "moe",
    "sliding_attention",
}


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A configuration that a class of transformers serves as a text model."""

    whole: PretrainedConfig  # of all parts
    hf: PretrainedConfig  # of the text model, which may be all
    model_class: type[PreTrainedModel]
    architecture: str
    vocab_size: int
    max_model_len: int
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None

    def check_length(self, max_model_len: int) -> None:
        """Raises UnsupportedModel for a length that the model or its rotation does not serve."""
        if not 1 <= max_model_len <= self.max_model_len:
            raise UnsupportedModel(
                f"max_model_len: {max_model_len} is not in 1..{self.max_model_len}, "
                "the model's own limit"
            )
        for kind, original in _length_limits(self.hf):
            if max_model_len > original:
                raise UnsupportedModel(
                    f"rope_type: {kind!r} depends on the length of a context beyond {original} "
                    f"tokens; give --max-model-len {original} at most"
                )


def load(folder: Path, ignored_keys: Collection[str] = ()) -> TransformersConfig:
    """The configuration of a Hugging Face folder or a GGUF file. Raises UnsupportedModel."""
    raw = read_json(folder, CONFIG)
    if raw is None:
        raise UnsupportedModel(f"{folder / CONFIG} does not exist")
    if is_gguf(folder) and architecture_of(read_header(folder)).experts is not None:
        raise UnsupportedModel(
            "general.architecture: experts of a GGUF file are read for layers of ours alone"
        )
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModel(_unknown("this type", raw, CONFIG_MAPPING, kind))
    try:
        whole = _whole(folder, kind, raw)
    except Exception as error:  # classes check their fields in ways of their own
        raise UnsupportedModel(f"config.json: {error}") from error
    text = whole.get_text_config(decoder=True)
    raw_text = raw if text is whole else raw.get("text_config") or {}
    made = _class_of(whole, raw)
    _refuse_unknown_keys(raw, whole, made, ignored_keys)
    _refuse_unknown_keys(raw_text, text, made, ignored_keys)
    _refuse_values(text)
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model_type: {kind!r} has an encoder, which is not served")
    vocab_size = int(text.vocab_size)
    return TransformersConfig(
        whole=whole,
        hf=text,
        model_class=made,
        architecture=str((raw.get("architectures") or [kind])[0]),
        vocab_size=vocab_size,
        max_model_len=_max_model_len(text),
        checkpoint_dtype=str(
            raw.get("dtype") or raw.get("torch_dtype") or raw_text.get("dtype") or "float32"
        ),
        eos_token_ids=eos_token_ids(
            {**raw_text, **raw}, read_json(folder, GENERATION_CONFIG) or {}, vocab_size
        ),
        quantization=_quantization(raw, ignored_keys),
    )


def _quantization(raw: Mapping[str, Any], ignored: Collection[str]) -> Quantization | None:
    given = raw.get("quantization_config")
    if isinstance(given, dict) and given.get("quant_method") == MXFP4:
        return None  # the library reads it
    try:
        return registry.of_checkpoint(given, ignored=ignored)
    except UnsupportedQuantization as error:
        raise UnsupportedModel(str(error)) from None


def _whole(folder: Path, kind: str, raw: dict[str, Any]) -> PretrainedConfig:
    read: PretrainedConfig
    if is_gguf(folder):
        read = CONFIG_MAPPING[kind].from_dict(raw)
    else:
        read = AutoConfig.from_pretrained(folder, local_files_only=True)
    return read


def _unknown(what: str, raw: Mapping[str, Any], known: Iterable[str], given: object) -> str:
    near = difflib.get_close_matches(str(given), list(known), n=3, cutoff=0.5)
    hint = f"; the nearest it knows: {', '.join(near)}" if near else ""
    return (
        f"architectures: {raw.get('architectures')!r} (model_type {raw.get('model_type')!r}): "
        f"{what} is known neither here nor to transformers {transformers.__version__}{hint}"
    )


def _class_of(whole: PretrainedConfig, raw: Mapping[str, Any]) -> type[PreTrainedModel]:
    """The class that holds the text model and its head. Raises UnsupportedModel."""
    names = raw.get("architectures") or []
    made: Any
    if names:
        made = getattr(transformers, str(names[0]), None)
    else:
        made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(whole), None)
    if made is None or len(names) > 1:
        known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        raise UnsupportedModel(_unknown("this class", raw, sorted(known), (*names, "")[0]))
    is_its_own = made.config_class is type(whole)
    serves = is_its_own or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(whole), None) is made
    if not serves or not made.can_generate():
        raise UnsupportedModel(
            f"architectures: {made.__name__} of transformers {transformers.__version__} generates "
            f"no text from model_type {whole.model_type!r}"
        )
    found: type[PreTrainedModel] = made
    return found


def _refuse_unknown_keys(
    raw: dict[str, Any],
    config: PretrainedConfig,
    made: type[PreTrainedModel],
    ignored: Collection[str],
) -> None:
    """Raises UnsupportedModel for a key that asks for something and that no code reads.

    transformers would keep such a key, and compute as if it were not there.
    """
    for name in LOGITS:  # rules of generation, which classes hold and requests decide
        value = raw.get(name)
        if value is not None and value not in LOGITS[name] and name not in ignored:
            raise UnsupportedModel(f"{name}: {value!r} of config.json is not supported")
    known = {field.name for field in fields(config)} | set(config.attribute_map) | _WRITTEN
    source = _source_of(type(config), made)
    for name, value in raw.items():
        is_inert = value is None or name in INERT or value in NEUTRAL.get(name, ())
        if is_inert or name in known or name.startswith("_") or _mentions(source, name):
            continue
        if name in ignored:
            tell_ignored(name)
            continue
        raise UnsupportedModel(
            f"{name}: this key of config.json is not known to {made.__name__} of transformers "
            f"{transformers.__version__}, and it may change the output; if it does not, give "
            f"--ignore-config-keys {name}"
        )


def _source_of(*classes: type) -> str:
    """The text of all modules of transformers that define a class or one of its bases."""
    names = {base.__module__ for made in classes for base in made.__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.")]
    return "\n".join(inspect.getsource(module) for module in modules)


def _mentions(source: str, key: str) -> bool:
    """True if code reads an attribute or a string of this name."""
    return re.search(rf"[.\"']{re.escape(key)}\b", source) is not None


def _refuse_values(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel for an activation or a kind of layer that is not served."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        value = getattr(config, name, None)
        if value is not None and value not in ACT2FN:
            raise UnsupportedModel(f"{name}: {value!r} is not known")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _SERVED_KINDS:
            raise UnsupportedModel(f"layer_types: {kind!r} is not served")


def _max_model_len(config: PretrainedConfig) -> int:
    for name in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModel("config.json: max_position_embeddings is missing")


def _length_limits(config: PretrainedConfig) -> list[tuple[str, int]]:
    """(rope_type, longest length) of each rotation that depends on lengths beyond that."""
    given = getattr(config, "rope_parameters", None) or {}
    rotations = given.values() if all(isinstance(r, dict) for r in given.values()) else [given]
    return [
        (kind, int(rotation.get(ORIGINAL_LENGTH) or config.max_position_embeddings))
        for rotation in rotations
        if (kind := rotation.get("rope_type")) in _BY_LENGTH
    ]
