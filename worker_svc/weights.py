"""Checkpoint files to parameters: every parameter is written exactly once, or the tensor is named.

Deals in names, shapes and files; what a name means is the model's knowledge. Only safetensors are
read: nothing of a checkpoint is ever executed.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors of older checkpoints that are computed, not learned.
COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class WeightError(ValueError):
    """The checkpoint does not fit the model."""


class MissingWeight(WeightError):
    """A parameter has no tensor."""


class UnexpectedWeight(WeightError):
    """A tensor has no parameter, or a second tensor wants it."""


class WrongShape(WeightError):
    """A tensor does not have its parameter's shape."""


def load_weights(
    folder: Path, destinations: Mapping[str, Tensor], ignored: frozenset[str] = frozenset()
) -> None:
    """Copies each tensor of the checkpoint into the destination of its name.

    A destination may be a view of a larger, fused parameter; types are converted on the way.
    """
    pending = dict(destinations)
    files = checkpoint_files(folder)
    for number, file in enumerate(files, start=1):
        logger.info("reading weights: %s (%d of %d)", file.name, number, len(files))
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in ignored or COMPUTED.fullmatch(name):
                    continue
                _copy(name, tensors.get_tensor(name), pending, destinations)
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
    name: str, tensor: Tensor, pending: dict[str, Tensor], destinations: Mapping[str, Tensor]
) -> None:
    if name not in destinations:
        raise UnexpectedWeight(f"{name}: the model has no such parameter")
    if name not in pending:
        raise UnexpectedWeight(f"{name}: found in two files of the checkpoint")
    destination = pending.pop(name)
    if destination.shape != tensor.shape:
        raise WrongShape(
            f"{name}: has shape {tuple(tensor.shape)}, expected {tuple(destination.shape)}"
        )
    destination.copy_(tensor)


def _some(names: Mapping[str, Tensor]) -> str:
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
