"""The block map counts what a loop over all blocks counts, at every size."""

import numpy as np
import pytest

from scheduler_svc.core.kv.block_shares import CACHED, FULL, OWNED, SHARED, shares_of


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 63, 64, 65, 1000, 100_000])
@pytest.mark.parametrize("max_cells", [1, 64, 1024])
def test_each_cell_has_the_shares_of_its_blocks(num_blocks: int, max_cells: int) -> None:
    rng = np.random.default_rng(num_blocks + max_cells)
    refs = rng.integers(0, 4, num_blocks).astype(np.int32)
    is_cached = rng.integers(0, 2, num_blocks).astype(np.uint8)
    shares = shares_of(refs, is_cached, max_cells)
    assert len(shares.cells) <= max_cells
    assert shares.num_blocks == num_blocks
    for cell, found in enumerate(shares.cells.tolist()):
        begin = cell * shares.blocks_per_cell
        held = refs[begin : begin + shares.blocks_per_cell].tolist()
        known = is_cached[begin : begin + shares.blocks_per_cell].tolist()
        kinds = {
            OWNED: sum(count == 1 for count in held),
            SHARED: sum(count > 1 for count in held),
            CACHED: sum(not count and k for count, k in zip(held, known, strict=True)),
        }
        assert found == [
            max(kinds[kind] * FULL // len(held), kinds[kind] > 0)
            for kind in (OWNED, SHARED, CACHED)
        ]
    covered = len(shares.cells) * shares.blocks_per_cell
    assert covered - shares.blocks_per_cell < num_blocks <= covered or not num_blocks


def test_one_block_of_a_large_cell_is_seen() -> None:
    refs, is_cached = np.zeros(100_000, dtype=np.int32), np.zeros(100_000, dtype=np.uint8)
    refs[77_777] = 1
    assert shares_of(refs, is_cached, 64).cells[:, OWNED].max() == 1
