"""Scales of an FP8 KV cache: a checkpoint's own, or 1 where it has none and promises none.

Checkpoints that were calibrated hold one scale a layer for keys and one for values, or one for each
KV head, under one of two names.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels import fp8
from pagewire.gguf.files import is_gguf
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import ModelSpec
from worker_svc.models.stored.weight_files import MissingWeight, WeightError, read_matching
from worker_svc.models.weights import KV_SCALE, UnexpectedWeight, WrongShape
from worker_svc.quantization import registry

log = logging.getLogger(__name__)

# Outside of these the largest stored number, or a scale's inverse, would leave float32.
LEAST, MOST = 2.0**-96, 2.0**96


class UnusableScale(WeightError):
    """A scale of the checkpoint that nothing can be stored with."""


def read(
    folder: Path, sharding: Sharding, device: torch.device, *, has_files: bool = True
) -> Tensor:
    """Scales of this rank's heads and their inverses, [L, 4, Hkv] float32. Raises WeightError.

    A model of random weights has no files, and no scales.
    """
    whole = sharding.whole
    # GGUF has no name for them.
    found = dict(_found(folder, whole)) if has_files and not is_gguf(folder) else {}
    has_scales = bool(found) or registry.stored_kv_cache_dtype(whole.quantization) is not None
    log.info("scales of the FP8 KV cache: %s", "the checkpoint's" if has_scales else "1")
    if has_scales:
        sides = [_side(side, whole, found, folder) for side in "kv"]
    else:
        sides = [torch.ones((whole.num_layers, whole.attention.num_kv_heads))] * 2
    k, v = (side[:, sharding.kv_heads] for side in sides)  # [L, Hkv] each
    return fp8.scale_table(k.to(device), v.to(device))


def _found(folder: Path, whole: ModelSpec) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """The checkpoint's scales [Hkv] of all heads, by k or v and layer."""
    seen: dict[tuple[str, int], str] = {}
    num_kv_heads = whole.attention.num_kv_heads
    for name, tensor in read_matching(folder, KV_SCALE):
        match = KV_SCALE.fullmatch(name)
        assert match is not None
        place = match[2], int(match[1])
        if place[1] >= whole.num_layers:
            raise UnexpectedWeight(f"{name}: the model has {whole.num_layers} layers")
        if place in seen:
            raise UnexpectedWeight(f"{name}: {seen[place]} is there, too")
        seen[place] = name
        yield place, _checked(name, tensor, num_kv_heads)


def _checked(name: str, tensor: Tensor, num_kv_heads: int) -> Tensor:
    if tensor.numel() not in (1, num_kv_heads):
        shape = tuple(tensor.shape)
        raise WrongShape(f"{name}: has shape {shape}, expected 1 or {num_kv_heads} scales")
    if not tensor.is_floating_point():
        raise UnusableScale(f"{name}: is of {tensor.dtype}, a scale is a floating-point number")
    values = tensor.float().flatten()
    for value in values.tolist():
        if not LEAST <= value <= MOST:  # or NaN
            raise UnusableScale(f"{name}: is {value}, must be in {LEAST:.0e} to {MOST:.0e}")
    return values.expand(num_kv_heads)


def _side(
    side: str, whole: ModelSpec, found: dict[tuple[str, int], Tensor], folder: Path
) -> Tensor:
    """[L, Hkv]; a checkpoint has all of its scales or none."""
    for layer in range(whole.num_layers):
        if (side, layer) not in found:
            name = f"model.layers.{layer}.self_attn.{side}_scale"
            raise MissingWeight(f"{name} not found in {folder}, which has or promises KV scales")
    return torch.stack([found[side, layer] for layer in range(whole.num_layers)])
