"""Two ranks as processes with a model that transformers computes: one dies, and no text differs."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import TIMEOUT_S
from tests.worker_svc.ranks.test_ranks import running_group
from tests.worker_svc.transformers_models.families import Oracle, write
from tests.worker_svc.transformers_models.test_served import (
    CONFIG,
    LENGTHS,
    NUM_BLOCKS,
    NUM_TOKENS,
    generate,
    prompt_of,
    scheduled,
)

OPTIONS = {
    "--model-impl": "transformers",
    "--block-size": str(CONFIG.block_size),
    "--max-num-seqs": str(CONFIG.max_num_seqs),
    "--max-num-batched-tokens": str(CONFIG.max_num_batched_tokens),
    "--max-model-len": str(CONFIG.max_model_len),
}
# A window and a softcap; experts and states. All: shared keys, fused projections, latent keys.
FAMILIES = ["gemma2", "qwen3_next"]
if os.environ.get("PAGEWIRE_ALL_FAMILIES"):
    FAMILIES += ["mistral", "phi3", "gemma4", "cohere2", "mixtral", "qwen3_5", "glm4_moe_lite"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_rank(
    name: str, tmp_path: Path
) -> None:
    await lose_a_rank(name, tmp_path, {}, OPTIONS)


async def lose_a_rank(
    name: str,
    tmp_path: Path,
    sizes: dict[str, Any],
    options: dict[str, str],
    ready_s: float = 3 * TIMEOUT_S,
) -> None:
    """Runs eight requests on two ranks, of which one is killed after the first preemption."""
    options = options | {"--num-kv-blocks": str(NUM_BLOCKS.get(name, CONFIG.num_kv_blocks))}
    folder = write(name, tmp_path / name, sizes)
    oracle = Oracle(name, folder)
    prompts = [prompt_of(length) for length in LENGTHS] * 2
    wanted = [oracle(prompt, NUM_TOKENS) for prompt in prompts[: len(LENGTHS)]] * 2

    with running_group(folder, tmp_path / "log", options, ready_s) as ranks:

        async def together(engine: Engine, stub: Any) -> list[list[int]]:
            calls = [asyncio.create_task(generate(stub, prompt)) for prompt in prompts]
            (group,) = engine.groups
            while not group.core.view.num_preemptions:
                assert not all(call.done() for call in calls)
                await asyncio.sleep(0.001)
            os.kill(ranks.ranks[1], signal.SIGKILL)
            return await asyncio.gather(*calls)

        found, engine = await scheduled(ranks.port, together)
        ranks.wait_until_ready(2)
        assert "rank 1 ended with -9: all ranks start again" in ranks.log
    assert found == wanted
    (group,) = engine.groups
    assert group.num_recoveries == 1
