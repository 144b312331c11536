"""Rows are grouped by their adapters: each with one is in one tile, in order, and no other is."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adapters.group_rows import TokenColumns, group_rows, num_tiles
from kernels.adapters.stacks import RowGroups
from tests.kernels.adapters.stacked import state_of


def tiled(groups: RowGroups) -> list[tuple[int, list[int]]]:
    """The adapter and the rows of each tile that has one; those without come last."""
    order, tiles = groups.order.tolist(), groups.tiles.tolist()
    with_rows = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[: len(with_rows)] == with_rows
    assert all(0 < number <= groups.tile_rows for _, _, number in with_rows)
    return [(place, order[first : first + number]) for place, first, number in with_rows]


def expected(places: list[int], tile: int) -> list[tuple[int, list[int]]]:
    rows = {each: [row for row, of in enumerate(places) if of == each] for each in sorted(places)}
    return [
        (each, its[first : first + tile])
        for each, its in rows.items()
        if each >= 0
        for first in range(0, len(its), tile)
    ]


def in_slots(places: list[int], device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Slots in any order, one of them below 0 for each row without an adapter that has an odd
    number, and their state."""
    shuffled = np.random.default_rng(seed).permutation(len(places))
    by_slot = [0] * len(places)
    for row, slot in enumerate(shuffled):
        by_slot[slot] = places[row]
    slots = torch.tensor(shuffled, dtype=torch.int32)
    padding = [row for row, place in enumerate(places) if place < 0 and row % 2]
    slots[padding] = -1
    return slots.to(device), state_of(by_slot, device)


@pytest.mark.parametrize("num_adapters", [1, 3, 32, 200])
@pytest.mark.parametrize("num_rows", [1, 7, 33, 130, 300])
def test_any_adapters_of_any_rows(num_rows: int, num_adapters: int, device: torch.device) -> None:
    random = np.random.default_rng(num_rows * 1000 + num_adapters)
    places = random.integers(-1, num_adapters, num_rows).tolist()
    slots, state = in_slots(places, device, num_rows)
    groups = group_rows(slots, state, num_adapters, num_rows)
    assert tiled(groups) == expected(places, groups.tile_rows)


def test_tiles_suffice_whoever_has_rows(device: torch.device) -> None:
    most = 40
    cases = (
        [-1] * most,  # none
        list(range(most)),  # each row another
        [most - 1] * most,  # one for all, the last
        [0] * 17 + [1] * 17 + list(range(2, 8)),  # as many tiles as there can be for 8
    )
    for places in cases:
        slots, state = in_slots(places, device, 0)
        groups = group_rows(slots, state, max(places, default=0) + 1, most)
        assert tiled(groups) == expected(places, 16)
        assert len(groups.tiles) == num_tiles(most, max(places) + 1)


def test_only_the_first_sequences_are_rows(device: torch.device) -> None:
    slots, state = in_slots([0, 1, 1, 0], device, 3)
    assert tiled(group_rows(slots, state, 2, 3)) == [(0, [0]), (1, [1, 2])]


def test_tokens_have_the_adapters_of_their_sequences(device: torch.device) -> None:
    # The fourth sequence has no tokens, as padding of a graph has none; the fifth is none's.
    places, lengths = [1, -1, 0, 1, 0], [1, 4, 290, 0, 5]
    slots, state = in_slots(places, device, 1)
    firsts = np.zeros(len(places) + 1, dtype=np.int32)
    firsts[1:4] = np.cumsum(lengths[:3])
    columns = TokenColumns(
        torch.tensor([295, 3], dtype=torch.int32, device=device),
        torch.from_numpy(firsts).to(device),
    )
    groups = group_rows(slots, state, 2, 320, columns)
    rows = [1] + [-1] * 4 + [0] * 290 + [-1] * 25
    assert tiled(groups) == expected(rows, 64)
