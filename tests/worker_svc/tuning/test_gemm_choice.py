"""Choice of GEMM algorithms: timings decide, are stored, and hold on all ranks."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gemm.cublas_lt import CublasError, GemmKind, GemmShape, LibraryGemm
from tests.worker_svc.two_ranks import on_two_ranks
from worker_svc.config import GEMM_ALGORITHMS, WorkerConfig, parse
from worker_svc.models.gemm_choices import GemmChoice
from worker_svc.parallel.group import ALONE, Group, RankFailed
from worker_svc.tuning import gemm_choice
from worker_svc.tuning.gemm_cache import GemmCache
from worker_svc.tuning.gemm_choice import ByRows, Measure, Timing, quickest, shapes, summary
from worker_svc.tuning.gemm_timing import MANY_ROWS, in_turn, without_wrong

SLOW, QUICK, QUICKER = (bytes([i]) * 64 for i in range(3))
UP = GemmKind(24576, 4096, torch.bfloat16, adds=False)
DOWN = GemmKind(4096, 12288, torch.bfloat16, adds=True)
SMALL = GemmKind(1024, 1024, torch.bfloat16, adds=False)
SHAPES = [GemmShape(rows, kind) for rows in (40, 32) for kind in (UP, DOWN)]


def choose(
    wanted: Sequence[GemmShape],
    library: "Library",
    cache: GemmCache,
    measure: Measure,
    group: Group,
) -> dict[GemmKind, ByRows]:
    """The GEMMs chosen in place of torch's."""
    choices = gemm_choice.choose(wanted, library, cache, measure, group)
    assert set(choices) == set(wanted)
    return gemm_choice.by_kind(choices, library, group)


class Library:
    """GEMMs that only record their shape and algorithm; some algorithms are rejected."""

    def __init__(self, *unknown: bytes) -> None:
        self._unknown = unknown

    def gemm(self, shape: GemmShape, algorithm: bytes) -> LibraryGemm:
        if algorithm in self._unknown:
            raise CublasError("cublasLtMatmulAlgoCheck: CUBLAS_STATUS_NOT_SUPPORTED (15)")
        gemm: Any = (shape, algorithm)
        return gemm  # type: ignore[no-any-return]


class Clock:
    """Returns given times per algorithm and records the measured shapes."""

    def __init__(self, us: dict[bytes, float], torch_us: float = 100.0) -> None:
        self._us = us
        self._torch_us = torch_us
        self.asked: list[GemmShape] = []

    def __call__(self, shape: GemmShape) -> list[Timing]:
        self.asked.append(shape)
        return [Timing(None, self._torch_us), *(Timing(*pair) for pair in self._us.items())]


@pytest.fixture
def cache(tmp_path: Path) -> GemmCache:
    return GemmCache(tmp_path / "cache", "H200, driver 580, cuBLASLt 130100")


def file_of(folder: Path) -> Path:
    (path,) = (folder / "cache").iterdir()
    return path


def never(shape: GemmShape) -> Sequence[Timing]:
    raise AssertionError(f"{shape} is measured")


def all_by(algorithm: bytes) -> dict[GemmKind, dict[int, Any]]:
    return {
        kind: {rows: (GemmShape(rows, kind), algorithm) for rows in (40, 32)} for kind in (UP, DOWN)
    }


def test_the_quickest_multiplies_if_it_is_worth_a_change() -> None:
    torchs = Timing(None, 100.0)
    assert quickest(
        [torchs, Timing(SLOW, 110), Timing(QUICK, 90), Timing(QUICKER, 80)]
    ) == GemmChoice(QUICKER, 80, 100)
    assert quickest([torchs, Timing(QUICK, 98.5)]) == GemmChoice(None, 100, 100)
    assert quickest([torchs, Timing(QUICK, 97.5)]) == GemmChoice(QUICK, 97.5, 100)
    assert quickest([torchs]) == GemmChoice(None, 100, 100)


def test_an_algorithm_that_gives_another_product_is_out_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torchs, slow, quick, quicker = (
        Timing(algorithm, us)
        for algorithm, us in ((None, 100.0), (SLOW, 110.0), (QUICK, 90.0), (QUICKER, 80.0))
    )
    found = without_wrong(SHAPES[0], [torchs, slow, quick, quicker], [0.0, math.nan, 0.005, 0.9])
    assert found == [torchs, quick]
    assert "rows=40" in caplog.text
    assert "it is nan off torch's" in caplog.text
    assert "it is 0.9 off torch's" in caplog.text
    # With weights that are not finite, results cannot be compared, and torch's algorithm is kept.
    assert without_wrong(SHAPES[0], [torchs, slow, quick], [math.nan] * 3) == [torchs]


def test_only_what_is_left_to_the_library_and_large_is_asked_for() -> None:
    found = shapes([UP, SMALL, DOWN], [8, 32, 512, 32], lambda rows, kind: rows > 16)
    assert found == [GemmShape(rows, kind) for rows in (512, 32) for kind in (UP, DOWN)]


def test_shapes_for_which_torch_is_the_quickest_are_left_to_it(cache: GemmCache) -> None:
    def clock(shape: GemmShape) -> list[Timing]:
        return [Timing(None, 100), Timing(QUICK, 90 if shape.kind is UP else 100)]

    chosen = choose(SHAPES, Library(), cache, clock, ALONE)
    assert chosen == {UP: all_by(QUICK)[UP]}


def test_what_was_measured_is_remembered_and_not_measured_again(cache: GemmCache) -> None:
    first = Clock({SLOW: 120, QUICK: 90})
    assert choose(SHAPES, Library(), cache, first, ALONE) == all_by(QUICK)
    assert first.asked == SHAPES
    assert choose(SHAPES, Library(), cache, never, ALONE) == all_by(QUICK)


def test_torchs_own_is_remembered_as_well(cache: GemmCache) -> None:
    assert choose(SHAPES, Library(), cache, Clock({SLOW: 120}), ALONE) == {}
    assert choose(SHAPES, Library(), cache, never, ALONE) == {}


def test_only_shapes_that_are_new_are_measured_and_others_stay(cache: GemmCache) -> None:
    choose(SHAPES[:2], Library(), cache, Clock({QUICK: 90}), ALONE)
    clock = Clock({QUICKER: 50})
    chosen = choose(SHAPES[1:], Library(), cache, clock, ALONE)
    assert clock.asked == SHAPES[2:]
    assert chosen[DOWN] == {
        40: (GemmShape(40, DOWN), QUICK),
        32: (GemmShape(32, DOWN), QUICKER),
    }
    assert set(cache.read()) == set(SHAPES)


def test_an_algorithm_that_no_longer_serves_is_measured_anew(
    cache: GemmCache, caplog: pytest.LogCaptureFixture
) -> None:
    choose(SHAPES, Library(), cache, Clock({QUICK: 90}), ALONE)
    clock = Clock({QUICKER: 80})
    assert choose(SHAPES, Library(QUICK), cache, clock, ALONE) == all_by(QUICKER)
    assert clock.asked == SHAPES
    assert "a remembered algorithm is left out: cublasLtMatmulAlgoCheck" in caplog.text
    assert choose(SHAPES, Library(QUICK), cache, never, ALONE) == all_by(QUICKER)


def test_what_holds_for_another_device_or_library_is_not_taken(
    cache: GemmCache, tmp_path: Path
) -> None:
    choose(SHAPES, Library(), cache, Clock({QUICK: 90}), ALONE)
    other = GemmCache(tmp_path / "cache", "H200, driver 580, cuBLASLt 130200")
    assert other.read() == {}
    # Even if two keys have the same file.
    other._path = file_of(tmp_path)
    assert other.read() == {}


def cut(text: str) -> str:
    return text[: len(text) // 2]


def without_algorithms(text: str) -> str:
    return text.replace('"algorithm"', '"algorithms"')


def with_words_for_numbers(text: str) -> str:
    return text.replace('"rows": 40', '"rows": "many"')


def with_another_type(text: str) -> str:
    return text.replace("bfloat16", "float8")


def with_half_a_byte(text: str) -> str:
    return text.replace(QUICK.hex(), QUICK.hex()[1:])


def as_a_list(text: str) -> str:
    return json.dumps([json.loads(text)])


@pytest.mark.parametrize(
    "harm",
    [
        cut,
        without_algorithms,
        with_words_for_numbers,
        with_another_type,
        with_half_a_byte,
        as_a_list,
    ],
)
def test_a_file_that_does_not_say_it_is_measured_anew_and_mended(
    cache: GemmCache, tmp_path: Path, harm: Callable[[str], str]
) -> None:
    choose(SHAPES, Library(), cache, Clock({QUICK: 90}), ALONE)
    path = file_of(tmp_path)
    text = path.read_text()
    path.write_text(harm(text))
    assert path.read_text() != text
    clock = Clock({QUICKER: 80})
    assert choose(SHAPES, Library(), cache, clock, ALONE) == all_by(QUICKER)
    assert clock.asked == SHAPES
    assert choose(SHAPES, Library(), cache, never, ALONE) == all_by(QUICKER)


def test_where_nothing_can_be_written_each_start_measures(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    cache = GemmCache(tmp_path / "cache", "key")
    for _ in range(2):
        clock = Clock({QUICK: 90})
        assert choose(SHAPES, Library(), cache, clock, ALONE) == all_by(QUICK)
        assert clock.asked == SHAPES


def test_writing_leaves_nothing_but_the_file(cache: GemmCache, tmp_path: Path) -> None:
    for us in (90, 80):
        cache.add({SHAPES[0]: GemmChoice(QUICK, us, 100.0)})
    assert file_of(tmp_path).suffix == ".json"
    assert cache.read() == {SHAPES[0]: GemmChoice(QUICK, 80.0, 100.0)}


def choices_of_ranks(
    folder: Path, clocks: Sequence[Measure], libraries: Sequence[Library]
) -> list[dict[GemmKind, ByRows] | RuntimeError]:
    """Result or exception of `choose` on each of two ranks; the second has no folder."""

    def work(group: Group) -> dict[GemmKind, ByRows]:
        cache = GemmCache(folder / str(group.rank), "key")
        return choose(SHAPES, libraries[group.rank], cache, clocks[group.rank], group)

    return on_two_ranks(work)


def test_rank_0_measures_and_all_multiply_as_it_does(tmp_path: Path) -> None:
    found = choices_of_ranks(tmp_path, [Clock({QUICK: 90}), never], [Library(), Library()])
    assert found == [all_by(QUICK)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_rank_whose_library_cannot_do_as_rank_0_does_says_so_on_all(tmp_path: Path) -> None:
    first, second = choices_of_ranks(
        tmp_path, [Clock({QUICK: 90}), never], [Library(), Library(QUICK)]
    )
    assert isinstance(second, CublasError)
    assert isinstance(first, RankFailed)
    assert "rank 1: CublasError: cublasLtMatmulAlgoCheck" in str(first)


def test_a_clock_that_fails_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    def broken(shape: GemmShape) -> Sequence[Timing]:
        raise torch.OutOfMemoryError("no room for 8192 rows")

    first, second = choices_of_ranks(tmp_path, [broken, never], [Library(), Library()])
    assert isinstance(first, torch.OutOfMemoryError)
    assert isinstance(second, RankFailed)
    assert "no room for 8192 rows" in str(second)


def test_what_was_chosen_is_told(cache: GemmCache, caplog: pytest.LogCaptureFixture) -> None:
    def clock(shape: GemmShape) -> list[Timing]:
        return [Timing(None, 50), Timing(QUICK, 40 if shape.rows == 40 else 50)]

    with caplog.at_level(logging.INFO):
        choose(SHAPES, Library(), cache, clock, ALONE)
    assert (
        "GEMMs: 2 of 4 shapes by another algorithm than torch's, which take 80 us in place of "
        "100" in caplog.text
    )
    assert summary({SHAPES[0]: GemmChoice(None, 9, 9)}) == (
        "0 of 1 shapes by another algorithm than torch's"
    )


def test_weights_are_multiplied_in_turn_so_that_no_cache_holds_them() -> None:
    weights = [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(3)]
    calls = in_turn(weights, num_rows=64)
    assert sum(weight.nbytes for weight in calls) >= 256 << 20
    assert [weight.data_ptr() for weight in calls[:4]] == [
        weight.data_ptr() for weight in (*weights, weights[0])
    ]
    assert len(in_turn(weights, MANY_ROWS)) == 1
    assert len(in_turn([torch.empty(1, 1)], num_rows=64)) < 100


def test_the_option_is_one_of_two() -> None:
    assert parse([]).gemm_algorithms == "auto"
    for name in GEMM_ALGORITHMS:
        assert parse(["--gemm-algorithms", name]).gemm_algorithms == name
    with pytest.raises(ValueError, match="gemm_algorithms: cublas must be one of auto, torch"):
        WorkerConfig(gemm_algorithms="cublas")
