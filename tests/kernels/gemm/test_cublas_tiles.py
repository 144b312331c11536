"""Tiles that fit a GEMM: their numbers in cuBLASLt, and the selection."""

import pytest

from kernels.gemm import cublas_tiles
from kernels.gemm.cublas_tiles import fitting

MULTIPROCESSORS = 132
# cublasLtMatmulTile_t of CUDA 13's header, at both ends of every numbering rule.
HEADER = {
    (8, 8): 1, (256, 32): 35, (8, 128): 36, (8, 768): 46, (48, 64): 92, (64, 192): 116,
    (144, 64): 183, (192, 192): 209, (768, 64): 311, (64, 16): 312, (64, 112): 321, (64, 760): 392,
    (128, 8): 393, (192, 112): 460, (192, 224): 472, (256, 256): 513, (768, 80): 630,
}  # fmt: skip
NUMBERS = cublas_tiles._numbers()
TILES = {number: tile for tile, number in NUMBERS.items()}
ALONE, BY_FEATURES, BY_ROWS = 2, 3, 5


def test_numbers_are_the_headers() -> None:
    assert {tile: NUMBERS[tile] for tile in HEADER} == HEADER
    assert len(TILES) == len(NUMBERS) == 630


@pytest.mark.parametrize("num_rows", [33, 40, 64, 100, 200, 224, 256, 512, 1000, 1024])
@pytest.mark.parametrize("num_features", [1000, 4096, 6144, 24576])
def test_tiles_have_a_kernel_and_end_with_the_rows(num_rows: int, num_features: int) -> None:
    found = fitting(num_rows, num_features, MULTIPROCESSORS)
    assert 8 <= len(found) == len(set(found)) <= 10
    for tiling in found:
        features, rows = TILES[tiling.tile]
        whole, other = (features, rows) if tiling.option & 1 else (rows, features)
        assert whole in (64, 128, 192, 256)
        assert other % 8 == 0
        assert features * rows <= 256 * 192
        cuts = -(-num_rows // rows)
        assert cuts <= 4
        assert cuts * rows - num_rows < 8 * cuts
        assert tiling.cluster in (ALONE, BY_ROWS if cuts % 2 == 0 else BY_FEATURES)
        assert bool(tiling.option & 2) == (tiling.cluster == BY_ROWS)


def test_the_first_fills_one_wave() -> None:
    """64 x 2 tiles for 132 multiprocessors; tiles of 128 rows would compute 32 unused rows."""
    first = fitting(224, 4096, MULTIPROCESSORS)[0]
    assert TILES[first.tile] == (64, 112)
    first = fitting(176, 6144, MULTIPROCESSORS)[0]
    assert TILES[first.tile] in {(144, 64), (64, 176), (192, 48)}


def test_few_rows_and_many_have_none() -> None:
    assert fitting(24, 4096, MULTIPROCESSORS) == []
    assert fitting(1025, 4096, MULTIPROCESSORS) == []
