"""The rows of a step by their adapters, found on the device as a graph repeats it."""

from dataclasses import replace

from torch import Tensor

from kernels.adapters.group_rows import TokenColumns, group_rows
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models.adapted_stack import AdaptedStack
from worker_svc.models.layer_stack import LayerStack
from worker_svc.runner.device_slots import SlotsOnDevice


def with_adapters(
    batch: AttentionBatch,
    layers: LayerStack,
    held: SlotsOnDevice,
    slots: Tensor,
    num_rows: int,
    columns: TokenColumns | None = None,
) -> AttentionBatch:
    """A batch of so many tokens for these layers, which may know no adapters.

    `slots` [B] int32 are those of its sequences, below 0 of padding. Without `columns` each
    sequence has one token.
    """
    if not isinstance(layers, AdaptedStack):
        return batch
    most = layers.max_adapters
    return replace(batch, adapters=group_rows(slots, held.slot_state, most, num_rows, columns))
