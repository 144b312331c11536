"""Layers that rotate in ways of their own, by every implementation that runs on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from tests.worker_svc.models.test_models import MAX_MODEL_LEN, PROMPT_LEN, make_prompts, save
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.rope import RotaryConfig, rope_tables
from worker_svc.models.weights import load_weights

CPU = torch.device("cpu")
ROPES = {"slow": RotaryConfig(1e4), "quick": RotaryConfig(50.0)}
Hidden = dict[tuple[str | None, str | None], Tensor]
MIXED = [("slow", "quick"), ("quick", None), (None, "slow")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with heads of 32, a size that all implementations serve."""
    folder = tmp_path_factory.mktemp("llama")
    save(folder, "llama-wide-heads")
    return folder


def model_of(folder: Path, *ropes: str | None) -> Decoder:
    """The model, whose layers rotate by these names."""
    spec = model_config.load(folder)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, rope=rope))
        for layer, rope in zip(spec.layers, ropes, strict=True)
    )
    spec = replace(spec, layers=layers, ropes=ROPES)
    model = Decoder(spec, torch.float32, CPU, MAX_MODEL_LEN)
    load_weights(folder, dict(model.destinations()))
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
def by_torch(folder: Path) -> Hidden:
    """Hidden states of the model by the rotations of its layers."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWIRE_CPU_KERNELS", "0")
        for ropes in (*MIXED, ("slow", "slow")):
            model = model_of(folder, *ropes)
            model.pack()
            assert model.attention_backend == "torch"
            found[ropes] = hidden_states(model)
    return found


def test_each_layers_rotation_counts(by_torch: Hidden) -> None:
    first, *others = by_torch.values()
    assert not any(torch.allclose(first, other, atol=1e-2) for other in others)


@pytest.mark.parametrize("ropes", MIXED)
def test_the_c_kernels_take_each_layers_table(
    folder: Path, by_torch: Hidden, ropes: tuple[str | None, str | None]
) -> None:
    model = model_of(folder, *ropes)
    model.pack()
    assert model.attention_backend.startswith("c/")
    torch.testing.assert_close(hidden_states(model), by_torch[ropes], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ropes", MIXED)
def test_the_fused_layers_take_each_layers_table(
    folder: Path, by_torch: Hidden, ropes: tuple[str | None, str | None]
) -> None:
    model = model_of(folder, *ropes)
    model.fused = model._fuse()
    model._embedding = model._embed()
    torch.testing.assert_close(hidden_states(model), by_torch[ropes], atol=1e-4, rtol=1e-4)


def test_a_layer_without_rotation_sees_no_positions() -> None:
    tables = rope_tables(ROPES, [("slow", 8), (None, 8), ("slow", 8)], 32, CPU)
    assert tables.of_layer == (0, 1, 0)
    torch.manual_seed(0)
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    positions = torch.tensor([0, 3, 9, 20, 31])
    for rotated, plain in zip(
        reference.rotary_embedding(q, k, positions, tables.layer(1)), (q, k), strict=True
    ):
        assert torch.equal(rotated, plain)
