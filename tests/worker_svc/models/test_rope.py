"""The cos/sin table against transformers and against the definition."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker_svc.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    Scaling,
    YarnScaling,
    attention_factor,
    cos_sin_table,
    frequencies,
)

HEAD_DIM = 64
SHORT = tuple(1 + pair / 64 for pair in range(HEAD_DIM // 2))
LONG = tuple(1.5 + pair for pair in range(HEAD_DIM // 2))
ORIGINAL = "original_max_position_embeddings"
FACTORS: dict[str, object] = {
    "short_factor": list(SHORT),
    "long_factor": list(LONG),
    ORIGINAL: 256,
}
SCALINGS: list[tuple[dict[str, object], Scaling | None]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 256),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        YarnScaling(4.0, 256),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": False,
        },
        YarnScaling(40.0, 128, None, 16, 2, 0.7, 1.2, truncate=False),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.5,
        },
        YarnScaling(2.0, 512, attention_factor=1.5),
    ),
    (
        {"rope_type": "longrope", "factor": 4.0, **FACTORS},
        LongRopeScaling(SHORT, LONG, 256, 4.0),
    ),
    (
        {"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.2, **FACTORS},
        LongRopeScaling(SHORT, LONG, 256, 4.0, 1.2),
    ),
    (
        {"rope_type": "longrope", "factor": 1.0, **FACTORS, ORIGINAL: 1024},
        LongRopeScaling(SHORT, LONG, 1024, 1.0),
    ),
    ({"rope_type": "dynamic", "factor": 4.0}, DynamicScaling(4.0)),
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("parameters", "scaling"), SCALINGS)
def test_the_table_is_that_of_transformers(
    parameters: dict[str, object], scaling: Scaling | None, theta: float
) -> None:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    positions = torch.arange(1024)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), positions.unsqueeze(0))
    expected = torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)
    table = cos_sin_table(RotaryConfig(theta, scaling), HEAD_DIM, 1024)
    assert table.dtype == torch.float32
    # At an angle of 1000 radians, float32 has a resolution of 6e-5.
    torch.testing.assert_close(table, expected, atol=2e-4, rtol=0)


def test_plain_frequencies_fall_from_one_by_a_constant_ratio() -> None:
    expected = [10_000.0 ** (-2 * pair / 8) for pair in range(4)]
    plain = frequencies(RotaryConfig(10_000.0), 8, 64)
    torch.testing.assert_close(plain, torch.tensor(expected))


def test_the_longest_context_decides_between_the_factors() -> None:
    rope = RotaryConfig(10_000.0, LongRopeScaling(SHORT, LONG, 256, 4.0))
    plain = frequencies(RotaryConfig(10_000.0), HEAD_DIM, 256)
    torch.testing.assert_close(plain / frequencies(rope, HEAD_DIM, 256), torch.tensor(SHORT))
    torch.testing.assert_close(plain / frequencies(rope, HEAD_DIM, 257), torch.tensor(LONG))


def test_only_yarn_and_longrope_soften_attention() -> None:
    assert attention_factor(None) == 1.0
    assert attention_factor(LinearScaling(4.0)) == 1.0
    assert attention_factor(YarnScaling(1.0, 256)) == 1.0
    assert attention_factor(YarnScaling(4.0, 256)) == pytest.approx(1.1386294)
