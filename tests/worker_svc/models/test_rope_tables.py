"""Layers that rotate by tables of their own, by every implementation that runs on a CPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN, PROMPT_LEN, make_prompts, save
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.rope_tables import RopeTables
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.rope import RotaryConfig, cos_sin_table
from worker_svc.models.weights import load_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with heads of 32, a size that all implementations serve."""
    folder = tmp_path_factory.mktemp("llama")
    save(folder, "llama-wide-heads")
    return folder


def model_of(folder: Path, *thetas: float) -> Decoder:
    """The model, each of whose layers rotates by the frequencies of this base."""
    model = Decoder(model_config.load(folder), torch.float32, CPU, MAX_MODEL_LEN)
    load_weights(folder, dict(model.destinations()))
    tables = tuple(cos_sin_table(RotaryConfig(theta), 32, MAX_MODEL_LEN) for theta in thetas)
    model._ropes = RopeTables(tables, tuple(range(len(tables))))
    return model


@torch.inference_mode()
def hidden_states(model: Decoder) -> Tensor:
    (prompt,) = make_prompts(PROMPT_LEN)
    positions = torch.arange(PROMPT_LEN)
    batch = AttentionBatch(
        slot_mapping=16 + positions,
        block_tables=torch.arange(1, 4, dtype=torch.int32)[None],
        context_lens=torch.tensor([PROMPT_LEN], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, PROMPT_LEN], dtype=torch.int32),
        max_seqlen_q=PROMPT_LEN,
        max_context_len=PROMPT_LEN,
    )
    return model.forward(prompt, positions, model.new_cache(4, 16), batch)


@pytest.fixture(scope="module")
def by_torch(folder: Path) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWIRE_CPU_KERNELS", "0")
        model = model_of(folder, 1e4, 50.0)
        model.pack()
        assert model.attention_backend == "torch"
        found = hidden_states(model)
        alike = model_of(folder, 1e4, 1e4)
        alike.pack()
        assert not torch.allclose(found, hidden_states(alike), atol=1e-2)
    return found


def test_the_c_kernels_take_each_layers_table(folder: Path, by_torch: Tensor) -> None:
    model = model_of(folder, 1e4, 50.0)
    model.pack()
    assert model.attention_backend.startswith("c/")
    torch.testing.assert_close(hidden_states(model), by_torch, atol=1e-4, rtol=1e-4)


def test_the_fused_layers_take_each_layers_table(folder: Path, by_torch: Tensor) -> None:
    model = model_of(folder, 1e4, 50.0)
    model.fused = model._fuse()
    model._embedding = model._embed()
    torch.testing.assert_close(hidden_states(model), by_torch, atol=1e-4, rtol=1e-4)
