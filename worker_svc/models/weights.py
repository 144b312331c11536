"""Loads checkpoint files into parameters; every parameter must be written exactly once.

Handles names, shapes and files; the model maps names to parameters. Only safetensors are read: no
content of a checkpoint is executed. Errors name the tensor.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight

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


class Destination(Protocol):
    """What a tensor of a checkpoint fills: a Tensor, or rows of a linear layer's weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy_(self, values: Tensor, /) -> object: ...


@runtime_checkable
class IntegerDestination(Protocol):
    """A destination that takes groups of integers, too."""

    def put_narrow(self, values: GroupedWeight, /) -> None: ...


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

    def cut_groups(self, weight: GroupedWeight) -> GroupedWeight:
        """The part of a whole weight. Raises ValueError if it would cut a group."""
        length = weight.shape[self.dim] // self.count
        ends = self.index * length, (self.index + 1) * length
        return weight.columns(*ends) if self.dim else weight.rows(*ends)


def _whole(name: str) -> None:
    """Returns None: reads every tensor whole."""


class Filling:
    """Destinations by name, of which each must be filled exactly once, from any files."""

    def __init__(
        self,
        destinations: Mapping[str, Destination],
        ignored: frozenset[str] = frozenset(),
        share: Callable[[str], Share | None] = _whole,
    ) -> None:
        self._destinations = destinations
        self._pending = dict(destinations)
        self._ignored = ignored
        self._share = share

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name is left in its file."""
        is_kept_apart = COMPUTED.fullmatch(name) or KV_SCALE.fullmatch(name)
        return name in self._ignored or is_kept_apart is not None

    def claim(self, name: str, found: Sequence[int]) -> tuple[Destination, Share | None]:
        """What a tensor of this name and whole shape fills, and its share. Raises WeightError."""
        if name not in self._destinations:
            raise UnexpectedWeight(f"{name}: the model has no such parameter")
        if name not in self._pending:
            raise UnexpectedWeight(f"{name}: found in two files of the checkpoint")
        destination, share = self._pending.pop(name), self._share(name)
        wanted = tuple(destination.shape)
        if share is not None:
            wanted = share.whole(wanted)
        if tuple(found) != wanted:
            raise WrongShape(f"{name}: has shape {tuple(found)}, expected {wanted}")
        return destination, share

    def finish(self, source: Path) -> None:
        """Raises MissingWeight if a destination has not been filled."""
        if self._pending:
            raise MissingWeight(f"{_some(self._pending)} not found in {source}")


def load_weights(
    folder: Path,
    destinations: Mapping[str, Destination],
    ignored: frozenset[str] = frozenset(),
    share: Callable[[str], Share | None] = _whole,
) -> None:
    """Copies each tensor of the checkpoint, or its share, to the destination of that name.

    Destinations may be views of larger, fused parameters; dtypes are converted. Raises WeightError.
    """
    filling = Filling(destinations, ignored, share)
    files = checkpoint_files(folder)
    for number, file in enumerate(files, start=1):
        logger.info("reading weights: %s (%d of %d)", file.name, number, len(files))
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if not filling.ignores(name):
                    _copy(name, tensors, filling)
    filling.finish(folder)


def read_matching(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint with such a name, in a fixed order. Raises WeightError."""
    for file in checkpoint_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if names.fullmatch(name):
                    yield name, tensors.get_tensor(name)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
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


def _copy(name: str, tensors: Any, filling: Filling) -> None:
    part = tensors.get_slice(name)
    destination, share = filling.claim(name, part.get_shape())
    if share is None:
        destination.copy_(tensors.get_tensor(name))
    else:
        destination.copy_(share.cut(part, destination.shape[share.dim]))


def _some(names: Mapping[str, object]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
