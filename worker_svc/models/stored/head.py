"""Tells if a checkpoint that says its head is its embedding table stores one tensor, or two.

Which of them is stored decides, as in transformers: one is both; two that are equal are one; two
that differ stay two, whatever the configuration says.
"""

import logging
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch

from pagewire.gguf.files import is_gguf
from worker_svc.models.config import ModelConfig
from worker_svc.models.stored.checkpoint import Checkpoint
from worker_svc.models.stored.quantized import EMBEDDING

log = logging.getLogger(__name__)

HEAD, HEAD_PREFIX = "lm_head.weight", "lm_head."
ROWS_AT_ONCE = 1024  # that are compared; a copy of a whole head would be large


class Tensors(Enum):
    """The tensors that are read: the table, the head, or both."""

    TABLE = "table"  # it is the head, too, if the model has no head of its own
    HEAD = "head"  # it is the table, too
    BOTH = "both"


def stored_tensors(
    folder: Path, config: ModelConfig, dtype: torch.dtype, ignored: Collection[str] = ()
) -> Tensors:
    """The tensors to read for a model that is served in this type. Raises WeightError."""
    if is_gguf(folder) or not config.tie_word_embeddings:  # GGUF says it by what it holds
        return Tensors.TABLE
    with Checkpoint(folder) as checkpoint:
        heads = {name for name in checkpoint.names if name.startswith(HEAD_PREFIX)}
        heads.difference_update(ignored)
        if not heads:
            return Tensors.TABLE
        if heads != {HEAD}:
            log.warning("%s is stored apart from %s: both are kept", min(heads), EMBEDDING)
            return Tensors.BOTH
        if EMBEDDING not in checkpoint.names:
            return Tensors.HEAD
        place = _first_difference(checkpoint, dtype)
    if place is None:
        return Tensors.TABLE
    log.warning(
        "config.json says tie_word_embeddings, but %s differs from %s (%s): both are kept",
        HEAD,
        EMBEDDING,
        place,
    )
    return Tensors.BOTH


def as_stored(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """The configuration that holds for these tensors."""
    return replace(config, tie_word_embeddings=False) if tensors is Tensors.BOTH else config


def _first_difference(checkpoint: Checkpoint, dtype: torch.dtype) -> str | None:
    """The first place at which the two differ as numbers of this type; None: nowhere."""
    table, head = checkpoint.stored(EMBEDDING), checkpoint.stored(HEAD)
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
