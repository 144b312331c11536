"""After the rehearsals at start-up, no step compiles another kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker_svc.startup.test_precompile import ROOT

SHAPES = {  # of Qwen3-0.6B and 8B, which use different GEMM kernels
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "large": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
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
PROMPTS = [[0, n] for n in (*range(2, 67), 100, 127, 129, 255, 257, 511, 513, 1000, 4000)]
DECODES = [[n] for n in (2, 3, 5, 9, 15, 17, 23, 31, 33, 47, 63, 65, 129, 193, 253)]
MIXED = [[n, *prompts] for (n,) in DECODES for prompts in ([2], [13, 3], [40, 333, 9])]


@pytest.mark.parametrize("name", SHAPES)
def test_no_step_needs_a_kernel_that_was_not_rehearsed(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | SHAPES[name]))
    environment = {key: value for key, value in os.environ.items() if "TRITON" not in key}
    command = [sys.executable, "-W", "ignore", "-m", "tests.worker_svc.startup.unrehearsed"]
    ran = subprocess.run(
        [*command, str(tmp_path), json.dumps(PROMPTS + DECODES + MIXED)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    num_rehearsed, surprises = json.loads(ran.stdout)
    assert num_rehearsed > 20
    assert surprises == []
