"""Reads a model's config.json into a `ModelSpec`, and refuses what is not served, naming the field.

The family says what its keys mean (`families`); what means the same in all of them is read here.
`torch_dtype` is transformers 4's name of `dtype`.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.gguf.files import file_in, is_gguf, read_file
from pagewire.gguf.header import BadGguf
from worker_svc.models import config_keys, registry
from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families.family import Family
from worker_svc.models.spec import MlpAndExpertsSpec, ModelSpec, UnsupportedModel, experts_of
from worker_svc.quantization import registry as quantizations
from worker_svc.quantization.gguf import GgufTypes
from worker_svc.quantization.mxfp4 import Mxfp4
from worker_svc.quantization.online import Online
from worker_svc.quantization.registry import serves_experts
from worker_svc.quantization.scheme import Quantization, Scheme, UnsupportedQuantization

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TEXT = "text_config"
WANTED = "a model is a Hugging Face folder with config.json and safetensors, or a GGUF file"

log = logging.getLogger(__name__)


def load(folder: Path, ignored_keys: Collection[str] = (), quantization: str = "auto") -> ModelSpec:
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
    family = registry.family_of(raw.get("architectures"))
    (architecture,) = raw["architectures"]
    values = raw if architecture == family.architecture else _nested(raw)
    spec = _decoder(ConfigJson(architecture, values, ignored_keys), family)
    found = _quantization(folder, values, quantization, ignored_keys)
    if found is not None and spec.has_states and not _serves_hybrids(found):
        raise UnsupportedModel(
            f"quantization: {found.label} is not supported for {architecture}, which has "
            "recurrent states; only 8-bit floats are"
        )
    if found is not None and spec.layer_inputs is not None:
        raise UnsupportedModel(
            f"quantization: {found.label} is not supported for {architecture} with inputs of "
            "layers, which are read as plain numbers alone"
        )
    if found is not None and spec.has_latents:
        raise UnsupportedModel(
            f"quantization: {found.label} is not supported for {architecture}, whose keys and "
            "values are made of latents"
        )
    if isinstance(found, GgufTypes):
        spec = replace(spec, names=spec.names.of_experts_apart)
    elif isinstance(found, Mxfp4):
        _check_mxfp4(spec)
    elif found is not None and not all(map(serves_experts, _expert_schemes(spec, found))):
        raise UnsupportedModel(
            f"quantization: {found.label} is not supported for the experts of {architecture}, only "
            "8-bit floats are"
        )
    return replace(
        spec,
        checkpoint_dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids(values, defaults, spec.vocab_size),
        quantization=found,
    )


def _check_mxfp4(spec: ModelSpec) -> None:
    """Raises UnsupportedModel unless all layers have experts that MXFP4 is read for."""
    if not spec.names.stacks_experts:
        raise UnsupportedModel(f"quantization: mxfp4 is not supported for {spec.architecture}")


def _serves_hybrids(quantization: Quantization) -> bool:
    """True if layers with states are read in this format."""
    return isinstance(quantization, GgufTypes) or quantizations.is_float8(quantization)


def _expert_schemes(spec: ModelSpec, quantization: Quantization) -> Iterator[Scheme]:
    """The schemes in which each layer's first expert is stored, and that of every token.

    Raises UnsupportedModel for an expert of every token that is several others, and for those that
    one tensor holds, unless it is of plain numbers that are rounded as they are read.
    """
    names, is_rounded = spec.names, isinstance(quantization, Online)
    may_be_apart = is_rounded or any(not each.stacks_outputs for each in spec.other_names)
    for index, layer in enumerate(spec.layers):
        experts = experts_of(layer.feed)
        if experts is not None:
            are_together = names.stacks_outputs is not None and not may_be_apart
            is_half = isinstance(layer.feed, MlpAndExpertsSpec)
            if names.stacks_experts or are_together or is_half:
                raise UnsupportedModel(
                    f"quantization: {quantization.label} is not supported for the experts of "
                    f"{spec.architecture}"
                )
            if experts.shared is not None and experts.shared.count > 1:
                raise UnsupportedModel(
                    f"quantization: {quantization.label} is not supported for the shared experts "
                    f"of {spec.architecture}, which are {experts.shared.count} times as wide as "
                    "the others"
                )
            mlp = f"{names.layers}.{index}.{names.mlp}"
            shared = () if experts.shared is None else (names.shared_expert,)
            for expert in (f"{names.experts}.0", *shared):
                for part in (names.expert_gate, names.expert_up, names.expert_down):
                    yield quantization.scheme(f"{mlp}.{expert}.{part}")


def _nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a decoder that is one part of a model, with those that stand around them.

    Raises UnsupportedModel where both say something, and not the same. The tokens that end an
    output may differ: those of the whole model hold.
    """
    inner = raw.get(TEXT)
    if not isinstance(inner, dict):
        raise UnsupportedModel(f"config.json: {TEXT} is {inner!r}, not an object")
    own = (TEXT, "architectures", "model_type")
    outer = {name: value for name, value in raw.items() if name not in own and value is not None}
    for name, value in outer.items():
        may_differ = name in config_keys.INERT or name == "eos_token_id"
        if not may_differ and inner.get(name) not in (None, value):
            raise UnsupportedModel(
                f"{TEXT}.{name}: differs from {name} of config.json, and only one can hold"
            )
    return inner | outer


def _decoder(config: ConfigJson, family: Family) -> ModelSpec:
    """The decoder as its family reads it."""
    model_type = config.get("model_type")
    if model_type not in (None, family.model_type):
        raise UnsupportedModel(f"model_type: {model_type!r} is not that of {family.architecture}")
    reason = config_keys.refusal(config.values, family, config.ignored_keys)
    if reason is not None:
        raise UnsupportedModel(reason)
    return family.read(config)


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


def _quantization(
    folder: Path, raw: Mapping[str, Any], asked: str, ignored: Collection[str]
) -> Quantization | None:
    try:
        if is_gguf(folder):
            return quantizations.chosen(asked, GgufTypes.of(folder))
        stored = quantizations.of_checkpoint(raw.get("quantization_config"), ignored=ignored)
        return quantizations.chosen(asked, stored)
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
