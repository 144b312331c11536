"""Loads checkpoint files into parameters; every parameter must be written exactly once.

Handles names, shapes and files; the model maps names to parameters. Only safetensors are read: no
content of a checkpoint is executed. Errors name the tensor.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Buffers in older checkpoints that are computed here.
COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# How to store keys and values in FP8: no parameters, and read apart (`startup.kv_scales`). Named
# `self_attn.k_scale` by compressed-tensors, `self_attn.k_proj.k_scale` by ModelOpt.
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.(?=k)|v_proj\.(?=v))?([kv])_scale"
)


class WeightError(ValueError):
    """The checkpoint does not match the model."""


class MissingWeight(WeightError):
    """A parameter is not in the checkpoint."""


class UnexpectedWeight(WeightError):
    """A tensor has no parameter, or occurs twice."""


class UnreadableWeights(WeightError):
    """A file of the checkpoint is damaged or cut off."""


class WrongShape(WeightError):
    """A tensor's shape differs from its parameter's."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal parts of a tensor along a dimension."""

    dim: int
    index: int
    count: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor, for the shape of a part."""
        return (*shape[: self.dim], shape[self.dim] * self.count, *shape[self.dim + 1 :])

    def cut(self, tensor: Any, length: int) -> Tensor:
        """Reads the part, of this length along the dimension, from a slice of safetensors."""
        part = slice(self.index * length, (self.index + 1) * length)
        cut: Tensor = tensor[(slice(None),) * self.dim + (part,)]
        return cut


def _whole(name: str) -> None:
    """Returns None: reads every tensor whole."""


def load_weights(
    folder: Path,
    destinations: Mapping[str, Tensor],
    ignored: frozenset[str] = frozenset(),
    share: Callable[[str], Share | None] = _whole,
) -> None:
    """Copies each tensor of the checkpoint, or its share, to the destination of that name.

    Destinations may be views of larger, fused parameters; dtypes are converted. Raises WeightError.
    """
    pending = dict(destinations)
    files = checkpoint_files(folder)
    for number, file in enumerate(files, start=1):
        logger.info("reading weights: %s (%d of %d)", file.name, number, len(files))
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in ignored or COMPUTED.fullmatch(name) or KV_SCALE.fullmatch(name):
                    continue
                _copy(name, tensors, pending, destinations, share(name))
    if pending:
        raise MissingWeight(f"{_some(pending)} not found in {folder}")


def read_matching(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint with such a name, in a fixed order. Raises WeightError."""
    for file in checkpoint_files(folder):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if names.fullmatch(name):
                    yield name, tensors.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The tensors of a file. Raises UnreadableWeights."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        size = file.stat().st_size
        raise UnreadableWeights(
            f"{file} ({size} bytes) is damaged or cut off, fetch it again: {error}"
        ) from error


def checkpoint_files(folder: Path) -> list[Path]:
    """Paths of the checkpoint's files, in a fixed order. Raises MissingWeight."""
    if (folder / INDEX).exists():
        files = [folder / name for name in _indexed(folder / INDEX)]
    else:
        files = [folder / SINGLE]
    for file in files:
        if not file.exists():
            raise MissingWeight(f"{file} does not exist; weights are read from safetensors only")
    return files


def _indexed(path: Path) -> list[str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableWeights(f"{path} is no index of weights, fetch it again") from error


def _copy(
    name: str,
    tensors: Any,
    pending: dict[str, Tensor],
    destinations: Mapping[str, Tensor],
    share: Share | None,
) -> None:
    if name not in destinations:
        raise UnexpectedWeight(f"{name}: the model has no such parameter")
    if name not in pending:
        raise UnexpectedWeight(f"{name}: found in two files of the checkpoint")
    destination = pending.pop(name)
    found, wanted = tuple(tensors.get_slice(name).get_shape()), tuple(destination.shape)
    if share is not None:
        wanted = share.whole(wanted)
    if found != wanted:
        raise WrongShape(f"{name}: has shape {found}, expected {wanted}")
    if share is None:
        destination.copy_(tensors.get_tensor(name))
    else:
        destination.copy_(share.cut(tensors.get_slice(name), destination.shape[share.dim]))


def _some(names: Mapping[str, Tensor]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
