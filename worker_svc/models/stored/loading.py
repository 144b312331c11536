"""Builds a model out of a folder or a GGUF file: which tensors are read, and by which reader."""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from pagewire.gguf import architecture
from pagewire.gguf.files import is_gguf
from pagewire.gguf.header import read_header
from worker_svc.models import config as model_config
from worker_svc.models.decoder import Decoder
from worker_svc.models.rope import LongRopeScaling
from worker_svc.models.spec import ModelSpec
from worker_svc.models.stored import dummy, head, left_over
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.models.stored.weight_files import WeightFiles
from worker_svc.models.weights import Filling, load_weights
from worker_svc.parallel.group import ALONE, Group
from worker_svc.process.host_memory import HostPeak
from worker_svc.quantization.scheme import Quantization

logger = logging.getLogger(__name__)

DUMMY = "dummy"  # a format that is no file's: random weights of a config.json alone


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    group: Group = ALONE,
    ignored_keys: Collection[str] = (),
    quantization: str = "auto",
    kv_dtype: torch.dtype | None = None,
    ignored_weights: Collection[str] = (),
    load_format: str = "auto",
) -> Decoder:
    """Loads the model of a folder or a GGUF file, or this rank's shard of it, ready to run.

    `ignored_keys` of its config.json are read as if they were not there, and tensors that a pattern
    of `ignored_weights` matches are left in their files; `quantization` other than "auto" rounds
    plain weights; `kv_dtype` is the type of the KV cache, None: that of the weights; of the format
    "dummy" only config.json is read, and weights are random. The log says how long it took, and
    what memory of the host. Raises UnsupportedModel or WeightError.
    """
    started = time.monotonic()
    spec = model_config.load(folder, ignored_keys, quantization)
    spec.check_length(max_model_len)
    _tell_long_rope(spec, max_model_len)
    with HostPeak() as host:
        new = partial(
            Decoder,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            group=group,
            kv_dtype=kv_dtype,
        )
        if load_format == DUMMY:
            model = new(spec)
            destinations, share = dict(model.destinations()), model.sharding.share
            embedding = spec.names.embedding_weight
            dummy.fill(destinations, spec.quantization, share, dtype, device, embedding)
        else:
            model = _read(folder, spec, dtype, new, ignored_weights)
        model.pack()
    logger.info(
        "loaded %s with %d layers in %.1f s; quantization: %s; host memory: %s",
        spec.architecture,
        spec.num_layers,
        time.monotonic() - started,
        "none" if spec.quantization is None else spec.quantization.label,
        host.report(),
    )
    return model


def _read(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    new: Callable[[ModelSpec], Decoder],
    ignored_weights: Collection[str],
) -> Decoder:
    """A new model with the weights of its files. Raises WeightError."""
    stored = _names(folder) if ignored_weights or spec.other_parts else set()
    ignored = left_over.named_by(ignored_weights, stored) if ignored_weights else frozenset()
    if spec.other_parts:
        spec = spec.named_as(stored)
        ignored |= left_over.of_other_parts(spec.other_parts, stored)
    tensors = head.stored_tensors(folder, spec, dtype, ignored)
    spec = head.as_stored(spec, tensors)
    model = new(spec)
    _fill(model, folder, spec.quantization, tensors, ignored)
    return model


def _tell_long_rope(spec: ModelSpec, max_model_len: int) -> None:
    """Says in the log when short contexts are not rotated as if the model served no longer ones."""
    for scaling in (rope.scaling for rope in spec.ropes.values()):
        if isinstance(scaling, LongRopeScaling) and scaling.is_long(max_model_len):
            logger.warning(
                "rope_scaling: max_model_len %d is above the original length: long_factor holds "
                "for all contexts; a max_model_len of at most %d has short_factor",
                max_model_len,
                scaling.original_max_position_embeddings,
            )


def _names(folder: Path) -> set[str]:
    """Names of all tensors, also of those that an index promises in vain. Raises WeightError."""
    if is_gguf(folder):
        return set(architecture.weights(read_header(folder)))
    return WeightFiles(folder).names()


def _fill(
    model: Decoder,
    folder: Path,
    quantization: Quantization | None,
    tensors: head.Tensors,
    ignored: frozenset[str],
) -> None:
    """Reads the weights of a model. Raises WeightError."""
    destinations, share = dict(model.destinations()), model.sharding.share
    names = model.spec.names
    if tensors is head.Tensors.HEAD:
        destinations[names.head_weight] = destinations.pop(names.embedding_weight)
    elif model.spec.tie_word_embeddings:
        ignored |= {names.head_weight}
    if is_gguf(folder):
        # Ranks on a CPU have no kernels for integers, nor have layers with states on any device.
        has_kernels = model.device.type == "cuda" or model.group.size == 1
        keeps_integers = has_kernels and not model.spec.has_states
        load_gguf(folder, Filling(destinations, ignored, share), model.device, keeps_integers)
        return
    WeightFiles(folder).warn_of_others()
    if quantization is None:
        load_weights(folder, destinations, ignored, share)
    else:
        load_quantized(
            folder,
            quantization,
            destinations,
            ignored,
            share,
            model.device,
            names.embedding_weight,
        )
