"""Adapters with random weights, in stacks as the kernels read them and one by one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.adapters.low_rank import OUTPUTS
from kernels.adapters.stacks import RANK_MULTIPLE, AdaptedLayer, AdapterStacks
from kernels.sampling.slot_state import ADAPTER, NUM_FIELDS


def padded(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


@dataclass(frozen=True, slots=True)
class Stacked:
    """Adapters of one layer of two, by place: A [parts, rank, K] and B [N, rank] of each."""

    layer: AdaptedLayer
    stacks: AdapterStacks
    a: list[Tensor]
    b: list[Tensor]

    @classmethod
    def drawn(
        cls,
        ranks: list[int],
        num_inputs: int,
        parts: tuple[tuple[int, int], ...],
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int = 0,
    ) -> "Stacked":
        """One adapter of each rank; whatever no adapter owns is NaN. Rank 0: it lacks the layer."""
        generator = torch.Generator().manual_seed(len(ranks) + num_inputs)
        num_outputs = parts[-1][1]
        before = 7  # values of another layer, for each rank
        b_at = before + len(parts) * num_inputs
        most = padded(max(max_rank, *ranks))
        values = torch.full((len(ranks), most * (b_at + num_outputs)), torch.nan)
        table = torch.zeros((len(ranks), 3), dtype=torch.int32)
        found_a, found_b = [], []
        for place, rank in enumerate(ranks):
            stride = padded(rank)
            table[place, 0], table[place, 2] = stride, rank
            a = torch.randn(len(parts), rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * max(1, rank) ** -0.5
            a, b = a.to(dtype), b.to(dtype)
            begin = stride * before
            rows = values[place, begin : stride * b_at].view(len(parts), stride, num_inputs)
            rows[:, :rank] = a.float()
            columns = values[place, stride * b_at : stride * (b_at + num_outputs)]
            columns.view(num_outputs, stride)[:, :rank] = b.float()
            found_a.append(a)
            found_b.append(b)
        blocks = [
            (index, first, min(first + OUTPUTS, end))
            for index, (begin, end) in enumerate(parts)
            for first in range(begin, end, OUTPUTS)
        ]
        layer = AdaptedLayer(
            2, num_inputs, num_outputs, parts, before, b_at,
            torch.tensor(blocks, dtype=torch.int32, device=device),
        )  # fmt: skip
        stacks = AdapterStacks(values.to(device, dtype), table.to(device), most)
        return cls(layer, stacks, found_a, found_b)

    def added(self, x: Tensor, places: list[int], width: int) -> Tensor:
        """The sums for each row [T, width], in float64; place -1: zeros."""
        found = torch.zeros((len(x), width), dtype=torch.float64)
        for row, place in enumerate(places):
            if place < 0:
                continue
            a, b = self.a[place].double(), self.b[place].double()
            for part, (begin, end) in enumerate(self.layer.parts):
                found[row, begin:end] = b[begin:end] @ (a[part] @ x[row].double().cpu())
        return found


def state_of(places: list[int], device: torch.device) -> Tensor:
    """`slot_state` of slots whose adapters have these places; -1: none."""
    state = torch.full((len(places), NUM_FIELDS.value), -5, dtype=torch.int64)
    state[:, ADAPTER.value] = torch.tensor(places) + 1
    return state.to(device)
