"""Tile sizes that fit a GEMM on Hopper, and their encoding for cuBLASLt.

    out [T, N]:  a tile covers some of the N features and some of the T rows

The library's heuristic returns few algorithms. If T is not a power of two, all of them may be slow:
tiles extend beyond the last row, or the last wave leaves most multiprocessors idle. The library has
kernels for all tile sizes; this module selects those that waste least.
"""

from dataclasses import dataclass
from functools import cache

_MOST_TILES = 5  # tile sizes tried per GEMM, with up to two clusters each
_MOST_CUTS = 4  # most tiles along the rows
_FEWEST, _MOST = 32, 256  # rows of a tile
_HEIGHTS = range(48, 257, 16)  # features of a tile
# A wgmma instruction multiplies 64 of one side by a multiple of 8, up to 256, of the other.
_WHOLE = (64, 128, 192, 256)
_MOST_SUMS = 256 * 192  # elements of a tile; limited by registers
_LARGE = 128 * 160
_OLD_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 "
    "64x128 128x64 64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 "
    "160x128 192x128 128x192 128x96 32x256 256x32"
)

# Cluster shapes of the library: 1x1, two tiles along the rows, two along the features.
_ALONE, _TWO_BY_ROWS, _TWO_BY_FEATURES = 2, 5, 3
# Bits of the algorithm's custom option; undocumented, found by experiment.
_WHOLE_FEATURES, _NEXT_BY_ROWS, _LARGE_TILE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to tile an output, in the library's enumerations."""

    tile: int  # cublasLtMatmulTile_t
    cluster: int  # cublasLtClusterShape_t
    option: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """Size of a tile in features and rows."""

    features: int
    rows: int
    is_whole: bool  # features, not rows, are the side of 64


def fitting(num_rows: int, num_features: int, num_multiprocessors: int) -> list[Tiling]:
    """Tilings to try for an output [num_rows, num_features], best fit first.

    Empty if the rows need more than four tiles: with that many waves any tile size fits.
    """

    def share(tile: _Tile) -> float:
        """Useful fraction of the multiprocessors' work in the waves that this tile needs."""
        tiles = _cuts(num_features, tile.features) * _cuts(num_rows, tile.rows)
        places = _cuts(tiles, num_multiprocessors) * num_multiprocessors
        return num_features * num_rows / (places * tile.features * tile.rows)

    def rank(tile: _Tile) -> tuple[float, int]:
        # With equal fit, the tile nearest to a square reads least.
        return round(share(tile), 2), min(tile.features, tile.rows)

    best = sorted(_tiles(num_rows), key=rank, reverse=True)[:_MOST_TILES]
    return [tiling for tile in best for tiling in _tilings(tile, _cuts(num_rows, tile.rows))]


def _tiles(num_rows: int) -> list[_Tile]:
    """Tile sizes with rows, in multiples of 8, that cover num_rows with least excess."""
    widths = {8 * _cuts(num_rows, 8 * cuts) for cuts in range(1, _MOST_CUTS + 1)}
    return [
        _Tile(features, rows, is_whole)
        for rows in sorted(widths)
        if _FEWEST <= rows <= _MOST
        for features in _HEIGHTS
        if features * rows <= _MOST_SUMS
        for is_whole in (False, True)
        if (features if is_whole else rows) in _WHOLE
    ]


def _tilings(tile: _Tile, cuts: int) -> list[Tiling]:
    """A tile alone, and in clusters of two: along the rows, which share the weight, if even."""
    number = _numbers()[tile.features, tile.rows]
    option = _WHOLE_FEATURES * tile.is_whole
    option += _LARGE_TILE * (tile.features * tile.rows >= _LARGE)
    pair = (_TWO_BY_ROWS, _NEXT_BY_ROWS) if cuts % 2 == 0 else (_TWO_BY_FEATURES, 0)
    return [Tiling(number, _ALONE, option), Tiling(number, pair[0], option + pair[1])]


@cache
def _numbers() -> dict[tuple[int, int], int]:
    """Maps (features, rows) to cublasLtMatmulTile_t as numbered in the header of CUDA 13.

    After the original ones come those with a multiple of 64 on the second side, then on the first.
    """
    old = [tuple(map(int, name.split("x"))) for name in _OLD_TILES.split()]
    wide = [(8 * i, 64 * j) for i in range(1, 97) for j in range(1, 13) if i * j * 512 <= 49152]
    high = [(64 * j, 8 * i) for j in range(1, 13) for i in range(1, 97) if i * j * 512 <= 65536]
    in_order = dict.fromkeys([*old, *wide, *high])
    return {(first, second): index for index, (first, second) in enumerate(in_order, start=1)}


def _cuts(whole: int, part: int) -> int:
    return -(-whole // part)
