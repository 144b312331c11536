"""Tells if a checkpoint that says its head is its embedding table stores one tensor, or two.

Which of them is stored decides, as in transformers: one is both; two that are equal are one; two
that differ stay two, whatever the configuration says.
"""

import logging
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from pagewire.gguf.files import is_gguf
from worker_svc.models.spec import ModelSpec
from worker_svc.models.stored.checkpoint import Checkpoint

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024  # that are compared; a copy of a whole head would be large


class Tensors(Enum):
    """The tensors that are read: the table, the head, or both."""

    TABLE = "table"  # it is the head, too, if the model has no head of its own
    HEAD = "head"  # it is the table, too
    BOTH = "both"


def stored_tensors(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, ignored: Collection[str] = ()
) -> Tensors:
    """The tensors to read for a model that is served in this type. Raises WeightError."""
    if is_gguf(folder) or not spec.tie_word_embeddings:  # GGUF says it by what it holds
        return Tensors.TABLE
    table, head = spec.names.embedding_weight, spec.names.head_weight
    with Checkpoint(folder) as checkpoint:
        heads = {name for name in checkpoint.names if name.startswith(f"{spec.names.head}.")}
        heads.difference_update(ignored)
        if not heads:
            return Tensors.TABLE
        if heads != {head}:
            log.warning("%s is stored apart from %s: both are kept", min(heads), table)
            return Tensors.BOTH
        if table not in checkpoint.names:
            return Tensors.HEAD
        place = _first_difference(checkpoint.stored(table), checkpoint.stored(head), dtype)
    if place is None:
        return Tensors.TABLE
    log.warning(
        "config.json says tie_word_embeddings, but %s differs from %s (%s): both are kept",
        head,
        table,
        place,
    )
    return Tensors.BOTH


def as_stored(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """The model as it is with these tensors."""
    return replace(spec, tie_word_embeddings=False) if tensors is Tensors.BOTH else spec


def _first_difference(table: Any, head: Any, dtype: torch.dtype) -> str | None:
    """The first place at which the two differ as numbers of this type; None: nowhere.

    Both are slices of safetensors.
    """
    shapes = tuple(table.get_shape()), tuple(head.get_shape())
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return f"shape {shapes[1]}, not {shapes[0]}"
    num_rows = shapes[0][0]
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        differ = table[rows].to(dtype) != head[rows].to(dtype)
        if bool(differ.any()):
            return f"first at row {begin + int(differ.any(dim=1).nonzero()[0])} of {num_rows}"
    return None
