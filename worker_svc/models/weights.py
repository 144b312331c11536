"""Loads checkpoint files into parameters: each is written exactly once, or an error names it.

It handles names, shapes and files; the model knows the meaning of names. Only safetensors are read:
no content of a checkpoint is ever executed.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors of older checkpoints that are computed here, not learned.
COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class WeightError(ValueError):
    """Raised when a checkpoint does not match the model."""


class MissingWeight(WeightError):
    """A parameter has no tensor."""


class UnexpectedWeight(WeightError):
    """A tensor has no parameter, or its parameter has a tensor already."""


class WrongShape(WeightError):
    """A tensor does not have its parameter's shape."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of equal parts of a tensor along a dimension."""

    dim: int
    index: int
    count: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, given that of a part."""
        return (*shape[: self.dim], shape[self.dim] * self.count, *shape[self.dim + 1 :])

    def cut(self, tensor: Any, length: int) -> Tensor:
        """The part, read from a slice of safetensors, of this length along the dimension."""
        part = slice(self.index * length, (self.index + 1) * length)
        cut: Tensor = tensor[(slice(None),) * self.dim + (part,)]
        return cut


def _whole(name: str) -> None:
    """Returns None: every tensor is read whole."""


def load_weights(
    folder: Path,
    destinations: Mapping[str, Tensor],
    ignored: frozenset[str] = frozenset(),
    share: Callable[[str], Share | None] = _whole,
) -> None:
    """Copies each tensor of the checkpoint, or its share, to the destination of its name.

    A destination may be a view of a larger, fused parameter; types are converted.
    """
    pending = dict(destinations)
    files = checkpoint_files(folder)
    for number, file in enumerate(files, start=1):
        logger.info("reading weights: %s (%d of %d)", file.name, number, len(files))
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in ignored or COMPUTED.fullmatch(name):
                    continue
                _copy(name, tensors, pending, destinations, share(name))
    if pending:
        raise MissingWeight(f"{_some(pending)} not found in {folder}")


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint, in a fixed order."""
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    else:
        files = [folder / SINGLE]
    for file in files:
        if not file.exists():
            raise MissingWeight(f"{file} does not exist; weights are read from safetensors only")
    return files


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
