"""The rate at which tokens that are computed another way are others: what is counted, and how."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.compare import recomputed
from bench.compare.recomputed import Parted, compare, main, summed


def test_what_follows_the_first_difference_is_not_compared() -> None:
    calm = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    other = [[1, 2, 3, 4], [5, 0, 0, 0], [9, 9, 9, 0]]
    assert compare(calm, other, 0) == Parted(outputs=3, parted=2, compared=4 + 2 + 4)
    assert compare(calm, other, 3) == Parted(outputs=3, parted=2, compared=3)


def test_a_rate_is_that_of_all_comparisons() -> None:
    total = summed([Parted(4, 1, 900), Parted(4, 2, 1100)])
    assert total == Parted(8, 3, 2000)
    assert total.per_1000 == 1.5


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_every_way_gives_the_tokens_of_the_calm_run_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    """Random weights: outputs repeat little, so the prompts repeat themselves to be drafted for."""
    pieces = recomputed.random_prompts(0, 6, 9, 1000)
    monkeypatch.setattr(recomputed, "random_prompts", lambda *_: [piece * 5 for piece in pieces])
    path = tmp_path / "found.jsonl"
    sizes = ["--prompts", "6", "--tokens", "24", "--threads", "1"]
    main(["--shape", "tiny", *sizes, "--kv-cache-dtype", kv_cache_dtype, "--json", str(path)])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["way"] for one in found] == list(recomputed.WAYS)
    assert found[1]["drafts"] > 20
    assert [one["parted"] for one in found] == [0] * 4
    assert [one["compared"] for one in found] == [6 * (18 + 12 + 6), *[6 * 24] * 3]
