"""Loads checkpoint files into parameters; every parameter must be written exactly once.

Handles names, shapes and files; the model maps names to parameters. Only safetensors are read: no
content of a checkpoint is executed. Errors name the tensor.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from worker_svc.models.stored.weight_files import MissingWeight, OpenFile, WeightError, WeightFiles

logger = logging.getLogger(__name__)

# Buffers in older checkpoints that are computed here.
COMPUTED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)"
    r"|model\.layers\.\d+\.self_attn\.masked_bias"
)
# How to store keys and values in FP8: no parameters, and read apart (`startup.kv_scales`). Named
# `self_attn.k_scale` by compressed-tensors, `self_attn.k_proj.k_scale` by ModelOpt.
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.(?=k)|v_proj\.(?=v))?([kv])_scale"
)


class UnexpectedWeight(WeightError):
    """A tensor has no parameter, or occurs twice."""


class WrongShape(WeightError):
    """A tensor's shape differs from its parameter's."""


class Destination(Protocol):
    """The destination of a checkpoint's tensor: a Tensor, or rows of a linear layer's weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy_(self, values: Tensor, /) -> object: ...


@runtime_checkable
class IntegerDestination(Protocol):
    """A destination that takes groups of integers, too."""

    def put_narrow(self, values: GroupedWeight, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal parts of a tensor along a dimension, or of each of its sections."""

    dim: int
    index: int
    count: int
    sections: tuple[int, ...] = ()  # their sizes along the dimension; empty: it is one

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor, for the shape of a part."""
        return (*shape[: self.dim], shape[self.dim] * self.count, *shape[self.dim + 1 :])

    def cut(self, tensor: Any, length: int) -> Tensor:
        """Reads the part, of this length along the dimension, from a slice of safetensors."""
        parts, end = [], 0
        for size in self.sections or (length * self.count,):
            begin = end + self.index * (size // self.count)
            part = slice(begin, begin + size // self.count)
            parts.append(tensor[(slice(None),) * self.dim + (part,)])
            end += size
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def cut_groups(self, weight: GroupedWeight) -> GroupedWeight:
        """The part of a whole weight. Raises ValueError if it would cut a group, or sections."""
        if self.sections:
            raise ValueError(f"sections of {list(self.sections)} rows are not divided")
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
        """Raises UnexpectedWeight if a destination is ignored."""
        refuse_ignored(destinations, ignored)
        self._destinations = destinations
        self._pending = dict(destinations)
        self._ignored = ignored
        self._share = share

    def ignores(self, name: str) -> bool:
        """True if a tensor of this name is left in its file."""
        is_kept_apart = COMPUTED.fullmatch(name) or KV_SCALE.fullmatch(name)
        return name in self._ignored or is_kept_apart is not None

    def require_known(self, names: Collection[str]) -> None:
        """Raises UnexpectedWeight for names of tensors that nothing is filled with."""
        strange = [name for name in names if name not in self._destinations]
        if strange := sorted(name for name in strange if not self.ignores(name)):
            raise UnexpectedWeight(
                f"{some(strange)}: the model has no such parameter; what is no part of the model "
                "can be left out by --ignore-weights PATTERN"
            )

    def claim(self, name: str, found: Sequence[int]) -> tuple[Destination, Share | None]:
        """The place of a tensor of this name and whole shape, and its share. Raises WeightError."""
        if name not in self._destinations:
            raise UnexpectedWeight(f"{name}: the model has no such parameter")
        if name not in self._pending:
            raise UnexpectedWeight(f"{name}: found twice in the checkpoint")
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
            raise MissingWeight(f"{some(self._pending)} not found in {source}")


def refuse_ignored(needed: Collection[str], ignored: frozenset[str]) -> None:
    """Raises UnexpectedWeight if something that the model reads is to be ignored."""
    for name in sorted(ignored.intersection(needed)):
        raise UnexpectedWeight(f"ignore_weights: {name} is read, so it cannot be ignored")


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
    files = WeightFiles(folder)
    for number, file in enumerate(files.opened(), start=1):
        logger.info("reading weights: %s (%d of %d)", file.path.name, number, len(files.paths))
        _fill_from(file, filling)
    filling.finish(folder)


def _fill_from(file: OpenFile, filling: Filling) -> None:
    """Copies what counts in a file."""
    file.require_promised(filling.ignores)
    if file.unnamed:
        logger.warning(
            "%s: not read, since the index does not name this file for it: %s",
            file.path.name,
            some(file.unnamed),
        )
    filling.require_known(file.names)
    for name in file.names:
        if not filling.ignores(name):
            _copy(name, file.tensors, filling)


def _copy(name: str, tensors: Any, filling: Filling) -> None:
    part = tensors.get_slice(name)
    destination, share = filling.claim(name, part.get_shape())
    if share is None:
        destination.copy_(tensors.get_tensor(name))
    else:
        destination.copy_(share.cut(part, destination.shape[share.dim]))


def some(names: Collection[str]) -> str:
    """The first of many names, and how many there are besides."""
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
