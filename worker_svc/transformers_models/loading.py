"""Builds a model of transformers' classes out of a folder: its weights, or random ones."""

import fnmatch
import logging
import re
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from pagewire.gguf.files import is_gguf
from worker_svc.models.linear import Linear
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.stored.left_over import named_by
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.models.stored.weight_files import MissingWeight, WeightFiles
from worker_svc.models.weights import Destination, Filling, UnexpectedWeight, WrongShape, some
from worker_svc.quantization.scheme import Quantization
from worker_svc.transformers_models import attention
from worker_svc.transformers_models.config import MXFP4, TransformersConfig

log = logging.getLogger(__name__)

STANDARD_DEVIATION = 0.02
HEAD = "lm_head.weight"

# Tensors of parts that are no text model: drafting heads, and encoders of pictures and sounds.
_OTHER_PARTS = re.compile(
    r"(model\.)?(mtp|visual|vision_tower|vision_model|vision_embed_tokens|multi_modal_projector"
    r"|audio_tower|embed_vision|embed_audio)\b.*"
)


def load(
    folder: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    ignored_weights: Collection[str] = (),
) -> PreTrainedModel:
    """The model with the weights of a folder's safetensors, or of a GGUF file.

    Raises WeightError.
    """
    started = time.monotonic()
    attention.register()
    if is_gguf(folder):
        model = _empty(config, dtype, device)
        # Biases and tied heads are those of the class: what has no tensor ends the start.
        load_gguf(folder, Filling(dict(model.named_parameters())), device, keeps_integers=False)
        return prepared(model)
    if config.quantization is not None:
        return _load_quantized(folder, config, config.quantization, dtype, device, ignored_weights)
    options: dict[str, Any] = {}
    if _is_mxfp4(config):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with attention.refused_if_it_fails(config.model_class):
        loaded: Any = config.model_class.from_pretrained(
            folder,
            config=config.whole,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    model = loaded[0]
    _check(loaded[1], ignored_weights, folder)
    model.to(device=device)
    log.info(
        "loaded %s of transformers with %d layers in %.1f s",
        type(model).__name__,
        config.hf.num_hidden_layers,
        time.monotonic() - started,
    )
    return prepared(model)


def _load_quantized(
    folder: Path,
    config: TransformersConfig,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    ignored_weights: Collection[str],
) -> PreTrainedModel:
    """The model of a quantized checkpoint, whose weights become float numbers."""
    model = _empty(config, dtype, device)
    destinations: dict[str, Destination] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in destinations:
            linear = Linear(module.weight.data)
            destinations[f"{name}.weight"] = linear.rows(0, linear.shape[0])
    names = {name for file in WeightFiles(folder).opened() for name in (*file.names, *file.lacking)}
    ignored = {name for name in names if _OTHER_PARTS.fullmatch(name)}
    ignored |= named_by(ignored_weights, names)
    if config.hf.tie_word_embeddings:
        ignored |= {HEAD}.intersection(names)
    load_quantized(folder, quantization, destinations, frozenset(ignored), lambda _: None, device)
    return prepared(model)


def make(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with random weights that follow from their names, made on the device."""
    attention.register()
    model = _empty(config, dtype, device)
    for name, parameter in model.named_parameters():
        _fill(name, parameter)
    return prepared(model)


def _empty(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with weights of any value."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), attention.refused_if_it_fails(config.model_class):
            model: PreTrainedModel = config.model_class._from_config(  # type: ignore[no-untyped-call]
                config.whole, attn_implementation=attention.NAME, dtype=dtype
            )
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False)


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """The model set up to compute steps: nothing of training, and experts without host waits."""
    model.train(False).requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    if model.device.type == "cuda":
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


@torch.no_grad()
def _fill(name: str, parameter: nn.Parameter) -> None:
    """Norms get 1, biases 0, other weights normal numbers."""
    if parameter.ndim < 2:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    seed = zlib.crc32(name.encode())
    generator = torch.Generator(parameter.device).manual_seed(seed)
    parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)


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
