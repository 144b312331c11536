"""A model or a device that cannot be served: one sentence at the command, from the real worker."""

import json
import os
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from kernels.cpu.build import cache_folder
from tests.pagewire.launcher.run_of_up import Up

ROOT = Path(__file__).parents[3]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


@pytest.fixture
def real(tmp_path: Path):
    up = Up(tmp_path, checkout=ROOT)
    yield up
    up.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose weights are cut off in the middle of their header."""
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 5000) + b'{"model.norm"')
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cpu"], "model.safetensors (21 bytes) is damaged or cut off, fetch it again"),
        (["--device", "cuda"], "device: cuda is not available, torch finds no CUDA device"),
        (["--kv-cache-gib", "-1"], "kv_cache_gib: -1.0 must be above 0"),
    ],
)
def test_what_the_worker_refuses_is_one_sentence_with_status_1(real, model, options, said):
    torch_finds_none = {"CUDA_VISIBLE_DEVICES": ""}
    compiled = {"PAGEWIRE_CACHE": str(cache_folder(os.environ).parent)}  # kernels of other tests
    status, _, err = real.finish("--model", str(model), *options, **torch_finds_none, **compiled)
    assert status == 1
    assert said in err and "Traceback" not in err
    assert err.count("\n") == 1 and err.startswith("pagewire: error: the worker ended with status")
