"""Algorithms that are tried for a GEMM, with a fake of cuBLASLt."""

from ctypes import Array, c_uint64
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.gemm.cublas_lt import CublasLt, GemmKind, GemmShape
from kernels.gemm.cublas_tiles import fitting

NUM_NAMED, MULTIPROCESSORS = 8, 132
SUCCESS, NOT_SUPPORTED = 0, 15
TILE, SPLITS, REDUCTION, OPTION, CLUSTER = 1, 2, 3, 5, 8  # attributes of an algorithm
SHAPE = GemmShape(224, GemmKind(4096, 12288, torch.bfloat16, adds=True))
FITTING = fitting(224, 4096, MULTIPROCESSORS)


class Function:
    """A fake library function; it may write to arguments passed by reference."""

    def __init__(self, library: "Library", name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, *arguments: Any) -> object:
        known = getattr(self._library, f"_{self._name}", None)
        return SUCCESS if known is None else known(*arguments)


class Library:
    """A fake cuBLASLt: the heuristic returns eight algorithms; all tiles but some are supported."""

    def __init__(self, version: int, refused: set[int]) -> None:
        self._version = version
        self._refused = refused

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def _cublasLtGetVersion(self) -> int:
        return self._version

    def _cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, found, count = arguments
        count._obj.value = NUM_NAMED
        for index in range(NUM_NAMED):
            found[index].algorithm[7] = 1 + index
            found[index].algorithm[SPLITS] = 4
        return SUCCESS

    def _cublasLtMatmulAlgoConfigSetAttribute(self, *arguments: Any) -> int:
        algorithm, attribute, value, _ = arguments
        algorithm._obj[attribute % 8] = value._obj.value
        return SUCCESS

    def _cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        *_, algorithm, _ = arguments
        return NOT_SUPPORTED if algorithm._obj[TILE] in self._refused else SUCCESS

    def _cublasLtGetStatusName(self, status: int) -> bytes:
        return f"CUBLAS_STATUS_{status}".encode()


def candidates(
    monkeypatch: pytest.MonkeyPatch, version: int, major: int, refused: set[int]
) -> list["Array[c_uint64]"]:
    properties = SimpleNamespace(major=major, multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    library: Any = Library(version, refused)
    found = CublasLt(library, torch.device("cpu")).candidates(SHAPE)
    assert len(set(found)) == len(found)
    return [(c_uint64 * 8).from_buffer_copy(one) for one in found]


def names(algorithms: list["Array[c_uint64]"]) -> list[int]:
    """Indices of the heuristic's algorithms that these are, or were derived from."""
    return [algorithm[7] for algorithm in algorithms]


def test_two_named_ones_come_before_the_tiles_that_the_library_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = {FITTING[0].tile}
    found = candidates(monkeypatch, 130100, 9, refused)
    assert names(found[:2]) == [1, 2]
    served = [tiling for tiling in FITTING if tiling.tile not in refused]
    assert 0 < len(served) < len(FITTING)
    assert [(one[TILE], one[CLUSTER % 8], one[OPTION]) for one in found[2:]] == [
        (tiling.tile, tiling.cluster, tiling.option) for tiling in served
    ]
    # No split of K, whatever the algorithm that they were derived from.
    assert {(one[7], one[SPLITS], one[REDUCTION]) for one in found[2:]} == {(1, 1, 0)}


@pytest.mark.parametrize(("version", "major"), [(120905, 9), (130100, 8), (130100, 10)])
def test_elsewhere_all_named_ones_are_tried(
    monkeypatch: pytest.MonkeyPatch, version: int, major: int
) -> None:
    assert names(candidates(monkeypatch, version, major, set())) == list(range(1, 9))


def test_where_no_tile_serves_all_named_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {tiling.tile for tiling in FITTING}
    assert names(candidates(monkeypatch, 130100, 9, refused)) == list(range(1, 9))
