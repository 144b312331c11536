"""After the rehearsals at start-up, no step compiles another kernel."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.worker_svc.startup.test_precompile import ROOT

# Of Qwen3-0.6B and 8B, which use different GEMM kernels, and layers of two kinds in models of
# Gemma 3 and 2.
GEMMA = {
    "num_hidden_layers": 8,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": None,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "large": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "gemma3": GEMMA | {"architectures": ["Gemma3ForCausalLM"]},
    "gemma2": GEMMA | {"architectures": ["Gemma2ForCausalLM"]},
    "experts": {  # of Qwen3-30B-A3B, and a layer without
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
    },
}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
# Steps of [decoding rows, prompt, prompt ...].
SHORT = (*range(2, 35), *range(47, 50), *range(63, 67))  # all up to a tile, then at edges of 16
PROMPTS = [[0, n] for n in (*SHORT, 100, 127, 129, 255, 257, 511, 513, 1000, 4000)]
DECODES = [[n] for n in (2, 3, 5, 9, 15, 17, 23, 31, 33, 47, 63, 65, 129, 193, 253)]
MIXED = [[n, *prompts] for (n,) in DECODES[::2] for prompts in ([2], [13, 3], [40, 333, 9])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By shape the number of rehearsed kernels and the steps that needed others."""
    folders = [tmp_path_factory.mktemp(name) for name in SHAPES]
    for folder, shape in zip(folders, SHAPES.values(), strict=True):
        (folder / "config.json").write_text(json.dumps(MODEL | shape))
    environment = {key: value for key, value in os.environ.items() if "TRITON" not in key}
    command = [sys.executable, "-W", "ignore", "-m", "tests.worker_svc.startup.unrehearsed"]
    ran = subprocess.run(
        [*command, json.dumps(PROMPTS + DECODES + MIXED), *map(str, folders)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(SHAPES, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_no_step_needs_a_kernel_that_was_not_rehearsed(
    name: str, found: dict[str, list[Any]]
) -> None:
    num_rehearsed, surprises = found[name]
    assert num_rehearsed > 20
    assert surprises == []
