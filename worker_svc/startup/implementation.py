"""Chooses who computes a model: layers of pagewire, or the classes of transformers.

transformers is an extra of the worker: nothing of it is imported where layers of ours serve.
"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from kernels import fp8
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import DUMMY, registry
from worker_svc.models import config as model_config
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import ModelSpec, UnsupportedModel
from worker_svc.parallel.group import Group
from worker_svc.startup.pictures import ON, encodes_pictures

if TYPE_CHECKING:
    from worker_svc.transformers_models.config import TransformersConfig
    from worker_svc.transformers_models.model import TransformersModel

log = logging.getLogger(__name__)

NATIVE, TRANSFORMERS = "native", "transformers"
Shape = TypeVar("Shape", "ModelSpec", "TransformersConfig")


def shape_of(
    config: WorkerConfig, folder: Path, device: torch.device
) -> "ModelSpec | TransformersConfig":
    """The configuration of a folder's model, by the implementation that will compute it there.

    It serves contexts of the configured length. Raises UnsupportedModel, with the reason of layers
    of ours where they know the architecture.
    """
    if config.pictures == ON and config.model_impl == NATIVE:
        raise UnsupportedOption(f"pictures: {ON} is not served by --model-impl {NATIVE}")
    if config.model_impl == TRANSFORMERS or config.pictures == ON:
        return _for_length(config, _by_transformers(config, folder, _architectures(folder)))
    try:
        if config.model_impl != NATIVE and device.type == "cuda":
            _require_measured(folder)
        spec = model_config.load(folder, config.ignore_config_keys, config.quantization)
        _require_divided(config, spec)
        return _for_length(config, spec)
    except UnsupportedModel as refusal:
        names = _architectures(folder)
        if config.model_impl == NATIVE or names is None:
            raise
        is_ours = any(registry.find(name) is not None for name in names)
        if is_ours and config.quantization != "auto":
            raise  # transformers would refuse the option, and hide the reason
        try:
            found = _for_length(config, _by_transformers(config, folder, names))
        except UnsupportedModel as other:
            raise (refusal if is_ours else other) from None
        log.warning("the model is computed by transformers, more slowly: %s", refusal)
        return found


def _require_divided(config: WorkerConfig, spec: ModelSpec) -> None:
    """Raises UnsupportedModel for a hybrid that ranks do not divide; transformers may divide it.

    Models of other kinds are divided alike by both, and refused when they are made.
    """
    if spec.has_states or spec.names.mlp_gate_up is not None:
        Sharding(spec, 0, config.tensor_parallel_size)


def _require_measured(folder: Path) -> None:
    """Raises UnsupportedModel for a family whose layers of ours have not been run on CUDA."""
    for name in _architectures(folder) or ():
        family = registry.find(name)
        if family is not None and not family.measured_on_cuda:
            raise UnsupportedModel(
                f"architectures: layers of ours for {name} have not been measured on CUDA; "
                f"--model-impl {NATIVE} tries them"
            )


def _for_length(config: WorkerConfig, shape: Shape) -> Shape:
    """The shape. Raises UnsupportedModel if it does not serve contexts of the configured length."""
    shape.check_length(config.max_model_len or shape.max_model_len)
    return shape


def _architectures(folder: Path) -> list[str] | None:
    """The names in a model's config.json, not checked; None: there is none."""
    raw = model_config.read_json(folder, model_config.CONFIG)
    return None if raw is None else [str(name) for name in raw.get("architectures") or ()]


def load(
    config: WorkerConfig,
    folder: Path,
    shape: "TransformersConfig",
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> "TransformersModel":
    """The model by classes of transformers. Raises UnsupportedOption, or as loading does."""
    from worker_svc.transformers_models import loading  # noqa: PLC0415 - an extra
    from worker_svc.transformers_models.model import TransformersModel  # noqa: PLC0415

    _check_options(config, kv_dtype)
    place = loading.LoadTarget(shape, dtype, device, group)
    if config.load_format == DUMMY:
        load = partial(loading.make, place)
    else:
        load = partial(loading.load, folder, place, config.ignore_weights)
    # All have loaded, or none goes on: the model is then tried with all ranks.
    encodes = encodes_pictures(config, shape, device.type, group)
    made, division = group.together(load)
    return TransformersModel(shape, made, dtype, device, division, encodes_pictures=encodes)


def _by_transformers(
    config: WorkerConfig, folder: Path, names: list[str] | None
) -> "TransformersConfig":
    try:
        from worker_svc.transformers_models import config as library  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name != TRANSFORMERS:
            raise
        raise UnsupportedModel(
            f"architectures: {names!r} is not one of {', '.join(registry.BUILT_IN)}; transformers "
            "may know it: pip install 'pagewire[transformers]'"
        ) from None
    return library.load(folder, config.ignore_config_keys)


def check_states(config: WorkerConfig, shape: ModelSpec, kv_dtype: torch.dtype) -> None:
    """Raises UnsupportedOption for an option that a cache of another form does not serve.

    Such are those of states, of latents, and of heads that differ by layer.
    """
    if shape.has_states:
        reason = "whose sequences have states besides keys and values"
    elif shape.has_latents:
        reason = "whose cache holds latents"
    elif not shape.has_one_attention:
        reason = "whose cache has heads of several sizes"
    else:
        return
    if config.draft_model is not None:
        raise UnsupportedOption(f"draft_model: is not served for {shape.architecture}, {reason}")
    if fp8.is_fp8(kv_dtype):
        raise UnsupportedOption(
            f"kv_cache_dtype: FP8, asked for by the option or the checkpoint, is not served for "
            f"{shape.architecture}"
        )


def _check_options(config: WorkerConfig, kv_dtype: torch.dtype) -> None:
    """Raises UnsupportedOption for an option that classes of transformers do not serve."""
    default = WorkerConfig()
    for name in ("quantization", "draft_model", "attention_backend"):
        value = getattr(config, name)
        if value != getattr(default, name):
            raise UnsupportedOption(
                f"{name}: {value} is not served for a model that transformers computes"
            )
    if fp8.is_fp8(kv_dtype):
        raise UnsupportedOption(
            "kv_cache_dtype: FP8, asked for by the option or the checkpoint, is not served for a "
            "model that transformers computes"
        )
