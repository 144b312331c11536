"""Models that transformers computes, divided among two GPUs: tokens equal to the library's own."""

from pathlib import Path

import pytest
import torch

from tests.worker_svc.transformers_models.test_lost_ranks import OPTIONS, lose_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
READY_S = 180  # kernels are compiled at the first start


# Softcaps, fused projections that are gathered, experts, latent keys, states.
@pytest.mark.parametrize("name", ["gemma2", "phi3", "qwen3_moe", "glm4_moe_lite", "qwen3_5"])
async def test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_rank(
    name: str, tmp_path: Path
) -> None:
    sizes = {"head_dim": 16, "hidden_size": 64}  # heads that the kernels serve, but for the latent
    await lose_a_rank(name, tmp_path, sizes, {**OPTIONS, "--device": "cuda"}, READY_S)
