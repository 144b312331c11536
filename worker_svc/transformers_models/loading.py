"""Builds a model of transformers' classes out of a folder: its weights, or random ones.

A rank of several builds the same class with its own parts of the parameters, and reads no others.
"""

import copy
import fnmatch
import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from pagewire.gguf.files import is_gguf
from worker_svc.models.linear import Linear
from worker_svc.models.spec import TensorNames, UnsupportedModel
from worker_svc.models.stored import dummy
from worker_svc.models.stored.checkpoint import Checkpoint
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.stored.left_over import named_by
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.models.stored.weight_files import MissingWeight, WeightFiles
from worker_svc.models.weights import (
    Destination,
    Filling,
    Share,
    UnexpectedWeight,
    WrongShape,
    some,
)
from worker_svc.parallel.group import ALONE, Group
from worker_svc.quantization.scheme import Quantization
from worker_svc.transformers_models import attention
from worker_svc.transformers_models.config import MXFP4, TransformersConfig
from worker_svc.transformers_models.division import Division
from worker_svc.transformers_models.stored_parts import parts_of

log = logging.getLogger(__name__)

HEAD = TensorNames().head_weight

# Tensors of parts that are no text model: drafting heads, and encoders of pictures and sounds.
_OTHER_PARTS = re.compile(
    r"(model\.)?(mtp|visual|vision_tower|vision_model|vision_embed_tokens|multi_modal_projector"
    r"|audio_tower|embed_vision|embed_audio)\b.*"
)
# The library changes the process while it builds a model: the default type, and torch's functions.
_BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The target of a build: a model's configuration, where it lies, and its ranks."""

    config: TransformersConfig
    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE

    @property
    def made(self) -> type[PreTrainedModel]:
        """The model's class."""
        return self.config.model_class


def load(
    folder: Path, place: LoadTarget, ignored_weights: Collection[str] = ()
) -> tuple[PreTrainedModel, Division | None]:
    """The model with the weights of a folder's safetensors, or of a GGUF file.

    Of several ranks it has this one's parts, as the division says. Raises WeightError.
    """
    started = time.monotonic()
    outline, division = _outlined(place)
    if is_gguf(folder):
        model = _empty(outline, place, division)
        # Biases and tied heads are those of the class: what has no tensor ends the start.
        filling = Filling(dict(model.named_parameters()), share=_share_of(division))
        load_gguf(folder, filling, place.device, keeps_integers=False)
    elif place.config.quantization is not None:
        model = _empty(outline, place, division)
        _fill_quantized(model, folder, place, place.config.quantization, division, ignored_weights)
    else:
        model = _read(folder, outline, place, division, ignored_weights)
    log.info(
        "loaded %s of transformers with %d layers in %.1f s",
        place.made.__name__,
        place.config.hf.num_hidden_layers,
        time.monotonic() - started,
    )
    return _prepared(model, place, division), division


def make(place: LoadTarget) -> tuple[PreTrainedModel, Division | None]:
    """The model with random weights that follow from their names, made on the device."""
    outline, division = _outlined(place)
    model = _empty(outline, place, division)
    shapes = {name: parameter.shape for name, parameter in outline.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = dummy.values(name, shapes[name], parameter.dtype, place.device)
            parameter.copy_(values if division is None else division.part(name, values))
    return _prepared(model, place, division), division


def _outlined(place: LoadTarget) -> tuple[PreTrainedModel, Division | None]:
    """The model without memory, and how ranks divide it; None: there is one. Raises errors."""
    attention.register()
    with _BUILDING, torch.device("meta"), attention.refused_if_it_fails(place.made):
        outline: PreTrainedModel = place.made._from_config(  # type: ignore[no-untyped-call]
            place.config.whole, attn_implementation=attention.NAME
        )
    return outline, None if place.group.size == 1 else Division(outline, place.group)


def _built(
    place: LoadTarget, division: Division | None, source: Path | None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model as its class loads it, and what the class tells of that."""
    with _BUILDING, attention.refused_if_it_fails(place.made):
        made: Any = _class_of(place.made, division)
        model, told = made.from_pretrained(
            source,
            dtype=place.dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **{"config": place.config.whole, **options},
        )
    return model.train(False).requires_grad_(False), told


def _class_of(made: type[PreTrainedModel], division: Division | None) -> type[PreTrainedModel]:
    """The class, or one like it whose new models are divided before weights are read."""
    if division is None:
        return made

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made.__init__(self, *args, **kwargs)
        division.apply(self)

    # Of the same name and module, by which the library knows what a checkpoint calls its tensors.
    return type(made.__name__, (made,), {"__init__": init, "__module__": made.__module__})


def _read(
    folder: Path,
    outline: PreTrainedModel,
    place: LoadTarget,
    division: Division | None,
    ignored_weights: Collection[str],
) -> PreTrainedModel:
    """The model with plain weights. Raises WeightError."""
    is_mxfp4 = _is_mxfp4(place.config)
    if division is None:
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}
        model, told = _built(place, division, folder, **options)
    elif is_mxfp4:
        raise UnsupportedModel(
            f"tensor_parallel_size: {place.group.size}: experts in MXFP4 are served by one rank"
        )
    else:
        with Checkpoint(folder) as checkpoint:
            state = parts_of(checkpoint, outline, division)
            model, told = _built(place, division, None, state_dict=state)
    _check(told, ignored_weights, folder)
    return model


def _fill_quantized(
    model: PreTrainedModel,
    folder: Path,
    place: LoadTarget,
    quantization: Quantization,
    division: Division | None,
    ignored_weights: Collection[str],
) -> None:
    """Fills a model from a quantized checkpoint, whose weights become float numbers."""
    destinations = _destinations(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in destinations:
            linear = Linear(module.weight.data)
            destinations[f"{name}.weight"] = linear.rows(0, linear.shape[0])
    names = WeightFiles(folder).names()
    ignored = {name for name in names if _OTHER_PARTS.fullmatch(name)}
    ignored |= named_by(ignored_weights, names)
    if place.config.hf.tie_word_embeddings:
        ignored |= {HEAD}.intersection(names)
    share = _share_of(division)
    load_quantized(folder, quantization, destinations, frozenset(ignored), share, place.device)


def _destinations(model: PreTrainedModel) -> dict[str, Destination]:
    """Parameters, of tied ones the first, and the buffers that checkpoints hold."""
    every = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: held for name, held in model.state_dict().items() if name not in every}
    return {**dict(model.named_parameters()), **buffers}


def _share_of(division: Division | None) -> Callable[[str], Share | None]:
    """The shard of a tensor that this rank reads, by name; None: the whole tensor."""
    cuts = {} if division is None else division.cuts

    def share(name: str) -> Share | None:
        return cuts[name].share(name) if name in cuts else None

    return share


def _empty(
    outline: PreTrainedModel, place: LoadTarget, division: Division | None
) -> PreTrainedModel:
    """The model with parameters of any value, on the device, and buffers as the class has them."""
    nothing, cuts = torch.zeros((), dtype=place.dtype), {} if division is None else division.cuts
    state = {
        name: nothing.expand(cuts[name].shape(whole.shape) if name in cuts else whole.shape)
        for name, whole in outline.named_parameters()
    }
    config = copy.deepcopy(place.config.whole)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the library would look for its own readers
    model, _ = _built(place, division, None, config=config, state_dict=state)
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=place.device)
    return model


def _prepared(
    model: PreTrainedModel, place: LoadTarget, division: Division | None
) -> PreTrainedModel:
    """The model set up to compute steps: one rank adds each bias, and experts wait for no host."""
    nn.Module.to(model, device=place.device)
    if division is not None:
        division.drop_added_once(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    if place.device.type == "cuda":
        # Neither waits for the host; the first reads each chosen expert once.
        experts = "grouped_mm" if model.dtype == torch.bfloat16 else "batched_mm"
        model.config._experts_implementation = config._experts_implementation = experts
    kinds = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None)
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if chunk and kinds and isinstance(layer, int) and kinds[layer] == "chunked_attention":
            setattr(module, attention.CHUNK, chunk)
    return model


def _is_mxfp4(config: TransformersConfig) -> bool:
    stored = getattr(config.whole, "quantization_config", None) or {}
    return dict(stored).get("quant_method") == MXFP4


def _check(told: dict[str, Any], ignored: Collection[str], folder: Path) -> None:
    """Raises WeightError for what a checkpoint lacks, and for what the model has no place for."""
    if missing := sorted(told["missing_keys"]):
        raise MissingWeight(f"{some(missing)} not found in {folder}")
    if mismatched := sorted(told["mismatched_keys"]):
        name, found, wanted = mismatched[0][:3]
        raise WrongShape(f"{name}: has shape {tuple(found)}, expected {tuple(wanted)}")
    left = sorted(told["unexpected_keys"])
    others = [name for name in left if _OTHER_PARTS.fullmatch(name)]
    if others:
        log.info("not read, since they are no part of the text model: %s", some(others))
    strange = [
        name
        for name in left
        if name not in others and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]
    if strange:
        raise UnexpectedWeight(
            f"{some(strange)}: the model has no such parameter; what is no part of the model can "
            "be left out by --ignore-weights PATTERN"
        )
