"""The slots of a step's sequences with states, found on the device as a graph repeats it."""

from dataclasses import replace

import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch
from worker_svc.runner.graphs.step_map import Columns


def with_states(
    batch: AttentionBatch, columns: Columns[Tensor], num_sequences: int
) -> AttentionBatch:
    """A batch with slots and first tokens of so many sequences: no step of it has more.

    Those that the step does not have are padding: they have no slot, and begin and end with it.
    """
    num_tokens, number = columns.counts.unbind()
    places = torch.arange(num_sequences + 1, device=number.device)
    firsts, slots = columns.firsts[: num_sequences + 1], columns.slots[:num_sequences]
    return replace(
        batch,
        cu_seqlens_q=torch.where(places > number, num_tokens, firsts),
        slots=torch.where(places[:-1] < number, slots, -1),
    )
