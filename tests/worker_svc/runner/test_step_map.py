"""The places of a step's rows in a graph: sizes, order, tiles, and the buffer's columns."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from worker_svc.runner.graphs.step_map import (
    ENTERING_WORDS,
    MAX_ENTERING,
    Layout,
    StepMap,
    bucket_sizes,
    map_step,
    max_tiles,
    spread,
)
from worker_svc.runner.rows import RowDrafts, Rows

TILE = 8
LAYOUT = Layout(max_sequences=9, num_tiles=max_tiles(96, TILE))
SIZES = (16, 32, 96)
TILES = dict.fromkeys(SIZES, TILE)


def rows(*given: tuple[int, int, int, bool]) -> Rows:
    """Rows of (slot, tokens computed, tokens of this step, whether it samples)."""
    slots, computed, scheduled, samples = zip(*given, strict=True)
    columns = (np.array(column, dtype=np.int64) for column in (slots, scheduled, computed))
    return Rows(*columns, np.array(samples))


def mapped(*given: tuple[int, int, int, bool], sizes: Sequence[int] = SIZES) -> StepMap:
    found = map_step(rows(*given), sizes, TILES, LAYOUT)
    assert found is not None
    return found


@pytest.mark.parametrize("most", [1, 7, 16, 17, 100, 512, 2048, 8192])
def test_every_step_up_to_the_limit_has_a_size_that_pads_little(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == min(most, 4096)
    for num_tokens in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size - num_tokens < max(16, num_tokens / 3)


def test_decodes_come_first_the_longest_ahead_and_rows_that_do_not_sample_last() -> None:
    step = mapped(
        (7, 0, 5, False), (2, 30, 1, True), (4, 10, 9, True), (5, 60, 1, True), (1, 3, 1, False)
    )
    columns = LAYOUT.columns(step.buffer)
    assert step.size == 32
    assert columns.counts.tolist() == [17, 5]
    assert columns.num_decodes.tolist() == [2]
    assert columns.slots[:5].tolist() == [5, 2, 4, 1, 7]
    assert columns.starts[:5].tolist() == [60, 30, 10, 3, 0]
    assert columns.firsts[:6].tolist() == [0, 1, 2, 11, 12, 17]
    assert columns.samplers.tolist() == [5, 2, 4, *[-1] * 6]
    assert step.num_sampled == 3
    # The rows that sample are 2, 4 and 5, in this order.
    assert step.places.tolist() == [1, 2, 0]


def test_tiles_cover_every_prompt_once_and_the_most_keys_come_first() -> None:
    step = mapped((0, 5, 1, True), (1, 0, 20, True), (2, 64, 9, True), (3, 0, 8, False))
    columns = LAYOUT.columns(step.buffer)
    tiles = list(zip(columns.tile_rows.tolist(), columns.tile_firsts.tolist(), strict=True))
    used = [tile for tile in tiles if tile[0] >= 0]
    assert used == tiles[: len(used)]
    assert used == [(1, 8), (1, 0), (2, 16), (2, 8), (2, 0), (3, 0)]


def test_many_short_prompts_take_a_larger_graph_and_too_many_none() -> None:
    # 16 tokens have 2 tiles and 4 to spare, 32 have 4 and 4, 96 have 12 and 6.
    short = [(slot, 0, 2, True) for slot in range(7)]
    assert mapped(*short[:6]).size == 16
    assert mapped(*short).size == 32
    assert mapped(*short, sizes=(16, 96)).size == 96
    assert map_step(rows(*short), (16,), TILES, LAYOUT) is None


def test_steps_beyond_every_graph_have_no_map() -> None:
    assert map_step(rows((0, 0, 97, True)), SIZES, TILES, LAYOUT) is None
    assert mapped((0, 0, 96, True)).size == 96
    many = [(slot, 4, 1, True) for slot in range(10)]
    assert map_step(rows(*many), SIZES, TILES, LAYOUT) is None


def test_columns_are_the_same_places_on_host_and_device_and_are_aligned() -> None:
    layout = Layout(max_sequences=5, num_tiles=7)
    host = np.arange(layout.num_words, dtype=np.int32)
    device = torch.from_numpy(host.copy())
    ends = 0
    for a, b in zip(layout.columns(host), layout.columns(device), strict=True):
        assert a.tolist() == b.tolist()
        assert a[0] % 4 == 0 and a[0] >= ends
        ends = a[-1] + 1
    assert [len(column) for column in layout.columns(host)] == [2, 1, 1, 5, 5, 6, 5, 7, 7]


def test_entering_words_come_after_the_columns_unless_they_are_too_many() -> None:
    step = mapped((0, 0, 5, True))
    words = np.arange(30, dtype=np.int32)
    entering = step.with_entering(words, 2)
    assert entering is not None
    assert entering.buffer[LAYOUT.num_words :].tolist() == words.tolist()
    assert LAYOUT.columns(entering.buffer).num_entering.tolist() == [2]
    assert step.with_entering(words, MAX_ENTERING + 1) is None
    assert step.with_entering(np.zeros(ENTERING_WORDS + 1, dtype=np.int32), 2) is None


def test_a_row_with_drafts_lies_as_so_many_that_decode() -> None:
    plain = rows((3, 7, 3, True), (5, 20, 1, True), (0, 4, 9, False), (2, 40, 2, True))
    counts = np.array([2, 0, 0, 1])
    drafts = RowDrafts(counts, np.array([11, 12, 13]), np.zeros_like(counts))
    each = spread(dataclasses.replace(plain, drafts=drafts))
    assert each.slots.tolist() == [3, 3, 3, 5, 0, 2, 2]
    assert each.num_computed.tolist() == [7, 8, 9, 20, 4, 40, 41]
    assert each.num_scheduled.tolist() == [1, 1, 1, 1, 9, 1, 1]
    assert each.samples.tolist() == [True] * 4 + [False] + [True] * 2
    found = map_step(each, SIZES, TILES, LAYOUT)
    assert found is not None and not found.is_decode
    columns = LAYOUT.columns(found.buffer)
    order = found.places  # of each position, in the order in which drafts are verified
    assert columns.slots[order].tolist() == [3, 3, 3, 5, 2, 2]
    assert columns.starts[order].tolist() == [7, 8, 9, 20, 40, 41]
    assert spread(plain) is plain
