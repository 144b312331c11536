"""Hybrids at every length of prompt: edges of chunks, of blocks and of the classes' own chunks."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker_svc.conftest import Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import write

LONGEST = 130
# All short ones, and those around multiples of 16: blocks have 4 tokens, and chunks 48.
EDGES = [n for n in range(1, LONGEST + 1) if n < 20 or n % 16 in (15, 0, 1)]
CONFIG = replace(
    test_served.CONFIG, num_kv_blocks=300, max_num_batched_tokens=48, max_model_len=140
)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_5", "transformers"),
        ("nemotron_h", "transformers"),
        ("lfm2", "transformers"),
        ("qwen3_5", "native"),
        ("qwen3_next", "native"),
        ("nemotron_h", "native"),
        ("lfm2", "native"),
    ],
    ids="-".join,
)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Worker, list[int], list[int]]]:
    """A worker, a prompt, and the token that follows each of its beginnings."""
    sizes = {"max_position_embeddings": 160}
    name, implementation = request.param
    folder = write(name, tmp_path_factory.mktemp("hybrids") / name, sizes)
    prompt = test_served.prompt_of(LONGEST)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4
    with serving(replace(CONFIG, model_impl=implementation), folder) as worker:
        yield worker, prompt, logits.argmax(-1).tolist()


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "cold"])
async def test_the_first_token_after_every_length(
    hybrid: tuple[Worker, list[int], list[int]], is_cached: bool
) -> None:
    """Without a cache, which changes where steps end: all short ones, and those around edges."""
    worker, prompt, wanted = hybrid
    lengths = range(1, LONGEST + 1) if is_cached else EDGES

    async def each(engine: object, stub: object) -> list[list[int]]:
        return list(
            await asyncio.gather(*(test_served.generate(stub, prompt[:n], 1) for n in lengths))
        )

    found, engine = await test_served.under_a_scheduler(
        worker, each, enable_prefix_caching=is_cached
    )
    assert [tokens[0] for tokens in found] == [wanted[n - 1] for n in lengths]
    assert (engine.groups[0].core.counters.prefix_hit_tokens > LONGEST * 5) is is_cached
