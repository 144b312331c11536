"""The bytes of a step at real shapes, in GB: figures that were computed without this code."""

from pathlib import Path

import pytest

from bench.harness import checkpoints, tables
from bench.harness.floors import Formats, step_bytes
from worker_svc.models import config
from worker_svc.protocol.kv_groups import LayerGroup

ROWS = (1, 32, 256)
# Of weights, and of the cache and states, at a context of 1,024.
GB = {
    ("qwen3-30b-a3b", "auto"): ((6.1, 53.1, 60.4), (0.1, 3.2, 25.8)),
    ("qwen3-30b-a3b", "fp8"): ((3.4, 26.9, 30.5), (0.1, 3.2, 25.8)),
    ("gpt-oss-20b-mxfp4", "auto"): ((3.7, 12.5, 12.6), (0.03, 0.9, 7.3)),
    ("qwen3.5-35b-a3b", "auto"): ((5.9, 45.0, 68.3), (0.15, 4.8, 38.4)),
    ("qwen3.5-35b-a3b", "fp8"): ((3.5, 23.0, 34.7), (0.15, 4.8, 38.4)),
    ("gemma-4-26b-a4b", "auto"): ((7.64, 44.67, 50.47), (0.23, 7.38, 59.1)),
    ("gemma-4-e4b", "auto"): ((9.29, 9.29, 9.29), (0.066, 2.11, 16.9)),
    ("qwen3.5-9b", "auto"): ((15.9, 15.9, 15.9), (0.14, 4.4, 35.0)),
}


@pytest.mark.parametrize(("shape", "quantization"), GB)
def test_steps_of_real_shapes(tmp_path: Path, shape: str, quantization: str) -> None:
    spec = config.load(checkpoints.describe(tmp_path, shape))
    formats = Formats.of(spec, quantization)
    weights, others = GB[shape, quantization]
    for rows, weight_gb, other_gb in zip(ROWS, weights, others, strict=True):
        found = step_bytes(spec, rows, 1024, formats)
        assert found.weights / 1e9 == pytest.approx(weight_gb, abs=0.06)
        assert (found.cache + found.states) / 1e9 == pytest.approx(other_gb, rel=0.02, abs=0.01)
        assert found.total == found.weights + found.cache + found.states


def test_a_window_is_read_back_for_its_length_alone(tmp_path: Path) -> None:
    spec = config.load(checkpoints.describe(tmp_path, "gemma-3-4b"))
    short, long = (step_bytes(spec, 1, context, Formats()).cache for context in (1024, 4096))
    # 29 layers see 1,024 tokens at most, and 5 all of them.
    assert long / short == pytest.approx((29 + 5 * 4) / 34)


def test_slots_have_pages_of_their_own_in_every_group() -> None:
    groups = (LayerGroup(16), LayerGroup(4, window=8))
    assert tables.num_pages(groups, 17) == 2 + 5
    seen = [
        page
        for slot in range(3)
        for table in (lambda first, others: (first, *others))(*tables.tables(groups, 17, slot))
        for page in table.tolist()
    ]
    assert seen == list(range(1, 1 + 3 * 7))
