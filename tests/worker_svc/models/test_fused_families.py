"""Fused layers of whole models, interpreted: logits are those of the layers of torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker_svc.models.test_models import assert_same, make_prompts
from tests.worker_svc.models.test_windows import in_chunks, load
from tests.worker_svc.runner.interpreted import needs_interpreter
from tests.worker_svc.transformers_models.families import write
from worker_svc.models import kernel_limits

pytestmark = needs_interpreter
SIZES = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
# By name: a family's checkpoint, and the sizes that differ.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # The second layer has experts, in two groups of two, and half of each head is rotated.
    "glm4_moe": ("glm4_moe", SIZES | {"n_group": 2, "topk_group": 1}),
    "minimax_m2": ("minimax_m2", SIZES),  # one norm is of all heads
    "granite": ("granite", SIZES),  # what a layer adds has a factor
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whole and in chunks that end at a block's border, then tokens one by one."""
    folder = write(CASES[name][0], tmp_path, CASES[name][1])
    prompts = make_prompts(18, 36, 3)
    chunks = [[16, 1, 1], [16, 19, 1], [1, 1, 1]]
    by_torch = load(folder, "torch", monkeypatch)
    assert not kernel_limits.beyond_triton(by_torch.spec, 1)
    expected = in_chunks(by_torch, prompts, chunks)
    found = in_chunks(load(folder, "triton", monkeypatch), prompts, chunks)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    assert torch.cat(expected).abs().max() > 0.1
