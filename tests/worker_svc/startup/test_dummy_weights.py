"""--load-format dummy: a model out of a config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.configs import config_of
from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantization.conftest import logits_and_tokens
from worker_svc.config import WorkerConfig
from worker_svc.models import DUMMY, Decoder, load_model
from worker_svc.models.weights import WeightError
from worker_svc.parallel.group import Group
from worker_svc.quantization.scheme import UnsupportedQuantization
from worker_svc.startup import startup

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
    "eos_token_id": 159,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def made(folder: Path, group: Group | None = None, quantization: str = "auto") -> Decoder:
    group = group or Group(0, 1)
    return load_model(
        folder, torch.float32, CPU, MAX_MODEL_LEN, group, (), quantization, load_format=DUMMY
    )


def test_its_numbers_are_the_same_at_each_start(folder: Path) -> None:
    logits, tokens = logits_and_tokens(made(folder))
    again, same_tokens = logits_and_tokens(made(folder))
    assert logits.isfinite().all() and logits.std() > 0
    assert torch.equal(logits, again) and tokens == same_tokens


def test_plain_numbers_are_rounded_where_that_is_asked_for(folder: Path) -> None:
    plain, _ = logits_and_tokens(made(folder))
    rounded, _ = logits_and_tokens(made(folder, quantization="int8"))
    error = (rounded - plain).abs().max() / plain.abs().max()
    assert 0 < error < 0.1


def test_numbers_that_a_file_would_store_in_fewer_bits_are_refused(folder: Path) -> None:
    stored = SHAPE | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UnsupportedQuantization, match="load_format: dummy"):
        made(folder)


def test_without_the_option_the_files_are_missed(folder: Path) -> None:
    with pytest.raises(WeightError):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


def test_a_worker_serves_experts_of_a_hybrid_in_8_bits(tmp_path: Path) -> None:
    """The shape of Qwen3.5-35B-A3B, smaller: its experts lie in one tensor a layer."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 160,
    }
    config_json = config_of("qwen3.5-35b-a3b", 4) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    config = WorkerConfig(
        device="cpu", load_format=DUMMY, quantization="fp8", max_model_len=MAX_MODEL_LEN
    )
    model = startup.load(config, tmp_path, "float32", "")
    assert model.facts.quantization == "fp8 at load, channel"
    plain, _ = logits_and_tokens(made(tmp_path), 1)
    rounded, _ = logits_and_tokens(made(tmp_path, quantization="fp8"), 1)
    assert 0 < (rounded - plain).norm() < 0.5 * plain.norm()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_a_worker_serves_it(folder: Path, kv_cache_dtype: str) -> None:
    config = WorkerConfig(device="cpu", load_format=DUMMY, kv_cache_dtype=kv_cache_dtype)
    model = startup.load(config, folder, "float32", "")
    assert model.facts.vocab_size == SHAPE["vocab_size"]
    runner = startup.build_runner(config, model, 16)
    assert runner.limits.num_blocks == 16
