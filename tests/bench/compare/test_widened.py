"""A widened model says what the small one says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.compare import widened
from bench.harness import checkpoints
from tests.worker_svc.random_models import save_random_model

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
SHAPE = checkpoints.CheckpointShape(128, 96, 3, 16, 4, 16, 0, is_tied=False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    save_random_model(folder, (LlamaConfig, LlamaForCausalLM), SMALL)
    return folder


def test_logits_are_those_of_the_small_model(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "wide", SHAPE)
    folder = widened.widened(small, tmp_path / "wide", "wide")
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(0))
    found, expected = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)(tokens).logits
        for one in (folder, small)
    )
    # Weights are rounded to bfloat16.
    assert (found - expected).norm() <= 0.02 * expected.norm()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert wide.config.hidden_size == 128 and wide.config.num_hidden_layers == 3
    assert (wide.model.layers[1].mlp.gate_proj.weight != 0).all()


def test_heads_that_do_not_fit_are_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "wide", replace(SHAPE, num_kv_heads=16))
    with pytest.raises(ValueError, match="4 and 2 heads of 8 do not fit"):
        widened.widened(small, tmp_path / "wide", "wide")
