"""dtype `auto` on CPU: the fastest by a margin, and stable across starts."""

import json
import os
from pathlib import Path

import pytest
import torch

from kernels.cpu.build import cache_folder
from kernels.cpu.library import load
from worker_svc.tuning import cpu_dtype
from worker_svc.tuning.cpu_dtype import WeightShapes, choose, quickest

SHAPES = WeightShapes(((96, 32), (32, 64)), num_layers=2)


@pytest.mark.parametrize(
    ("bfloat16_ms", "float32_ms", "expected"),
    [
        (1.0, 2.0, torch.bfloat16),
        (2.0, 1.0, torch.float32),
        (1.0, 0.95, torch.bfloat16),  # within the margin
    ],
)
def test_bfloat16_unless_float32_is_clearly_quicker(
    bfloat16_ms: float, float32_ms: float, expected: torch.dtype
) -> None:
    assert choose({torch.bfloat16: bfloat16_ms, torch.float32: float32_ms}) == expected


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A cache that has the libraries which other tests have compiled, and nothing else."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for dtype in (torch.float32, torch.bfloat16):
        load(dtype)
    for library in cache_folder(os.environ).glob("*.so"):
        (folder / library.name).symlink_to(library)
    return tmp_path


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_what_was_measured_is_remembered(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PAGEWIRE_CACHE": str(compiled),
        "PAGEWIRE_CPU_KERNELS": kernels,
    }
    first = quickest(SHAPES, environment)
    monkeypatch.setattr(cpu_dtype, "_measure", lambda *_: pytest.fail("measured again"))
    assert quickest(SHAPES, environment) == first
    (path,) = (compiled / "kernels").glob("dtype-*.json")
    found = json.loads(path.read_text())
    quicker, slower = torch.float32, torch.bfloat16
    found["ms"] = {"bfloat16": 2.0, "float32": 1.0}
    path.write_text(json.dumps(found))
    assert quickest(SHAPES, environment) == quicker
    found["ms"] = {"bfloat16": 1.0, "float32": 2.0}
    path.write_text(json.dumps(found))
    assert quickest(SHAPES, environment) == slower


def test_what_cannot_be_read_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PAGEWIRE_CACHE": str(tmp_path), "PATH": "", "PAGEWIRE_CPU_KERNELS": "0"}
    times_ms = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(cpu_dtype, "_measure", lambda *_: times_ms)
    assert quickest(SHAPES, environment) == torch.float32
    (path,) = (tmp_path / "kernels").glob("dtype-*.json")
    path.write_text("{")
    times_ms[torch.bfloat16] = 1.0
    assert quickest(SHAPES, environment) == torch.bfloat16


def test_a_pass_reads_more_than_a_cache_holds_if_the_model_is_as_large() -> None:
    assert WeightShapes(((4096, 4096),), 32).num_copies == 1
    assert WeightShapes(((1024, 1024),), 32).num_copies == 16
    assert SHAPES.num_copies == 2
