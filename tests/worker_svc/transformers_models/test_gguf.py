"""Gemma out of GGUF files, computed by transformers over the paged cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.pagewire.gguf.test_gemma import FAMILIES, file_of, random_model
from worker_svc.attention.batch import AttentionBatch
from worker_svc.config import WorkerConfig
from worker_svc.startup import startup
from worker_svc.transformers_models.model import TransformersModel

NUM_TOKENS, BLOCK_SIZE = 20, 4  # longer than the window of 8
CPU = WorkerConfig(device="cpu", dtype="float32", max_model_len=32, model_impl="transformers")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_model_in_the_file(name: str, tmp_path: Path) -> None:
    oracle = random_model(name)
    path = file_of(oracle, name=name).write(tmp_path / "model.gguf")
    model = startup.load(CPU, path, "float32", "").decoder
    assert isinstance(model, TransformersModel)
    token_ids = torch.arange(NUM_TOKENS) % oracle.config.vocab_size
    positions = torch.arange(NUM_TOKENS)
    batch = AttentionBatch(
        slot_mapping=BLOCK_SIZE + positions,
        block_tables=torch.arange(1, 6, dtype=torch.int32).unsqueeze(0),
        context_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        max_seqlen_q=NUM_TOKENS,
        max_context_len=NUM_TOKENS,
    )
    hidden = model.forward(token_ids, positions, model.new_cache(6, BLOCK_SIZE), batch)
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_native_layers_refuse_the_file_by_its_architecture(tmp_path: Path) -> None:
    path = file_of(random_model("gemma"), name="gemma").write(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="GemmaForCausalLM"):
        startup.load(replace(CPU, model_impl="native"), path, "float32", "")
