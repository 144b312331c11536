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

from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import UnexpectedWeight, WrongShape, some
from worker_svc.transformers_models import attention
from worker_svc.transformers_models.config import MXFP4, TransformersConfig

log = logging.getLogger(__name__)

STANDARD_DEVIATION = 0.02

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
    """The model with the weights of a folder's safetensors. Raises WeightError."""
    started = time.monotonic()
    attention.register()
    options: dict[str, Any] = {}
    if _is_mxfp4(config):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
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
    model: PreTrainedModel = loaded[0]
    _check(loaded[1], ignored_weights, folder)
    model.to(device=device)  # type: ignore[call-arg]
    log.info(
        "loaded %s of transformers with %d layers in %.1f s",
        type(model).__name__,
        config.hf.num_hidden_layers,
        time.monotonic() - started,
    )
    return prepared(model)


def make(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with random weights that follow from their names, made on the device."""
    attention.register()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = config.model_class._from_config(  # type: ignore[no-untyped-call]
                config.whole, attn_implementation=attention.NAME, dtype=dtype
            )
    finally:
        torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        _fill(name, parameter)
    return prepared(model)


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
