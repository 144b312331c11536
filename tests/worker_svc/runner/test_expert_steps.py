"""Steps of models with experts as CUDA runs them, interpreted: tokens of the eager runner."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.models.test_models import DOTS1, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from tests.worker_svc.random_models import Family, save_random_model
from tests.worker_svc.runner.interpreted import (
    LIMITS,
    eager_runner,
    interpreted_runner,
    needs_interpreter,
)
from tests.worker_svc.runner.test_step_graphs import DRAWN, enter, play

pytestmark = needs_interpreter

SIZES: dict[str, Any] = {
    "vocab_size": LIMITS.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense, then experts": (QWEN3_MOE, EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "experts, then dense": (QWEN3_MOE, EXPERTS | {"mlp_only_layers": [1]}),
    "shared, with a gate": (QWEN2_MOE, EXPERTS | {"shared_expert_intermediate_size": 48}),
    "shared, by sigmoids": (
        DOTS1,
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "biases and sinks": (
        GPT_OSS,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "mixtral": (MIXTRAL, {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_chunks_and_decodes_give_the_tokens_of_the_eager_runner(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = FAMILIES[name]
    save_random_model(tmp_path, family, SIZES | changes)
    new = (enter(1, make_prompt(13)), enter(4, make_prompt(28, seed=2), DRAWN))
    steps = [
        ({1: 13, 4: 17}, new),
        ({1: 1, 4: 11, 0: 3}, (enter(0, make_prompt(3, seed=3)),)),
        ({0: 1, 1: 1, 4: 1}, ()),
        ({1: 1}, ()),
    ]
    expected = play(eager_runner(tmp_path), *steps)
    assert play(interpreted_runner(tmp_path, monkeypatch), *steps) == expected
