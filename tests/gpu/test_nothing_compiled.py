"""Once a worker is ready no request has a kernel compiled or tuned, whatever its rows ask for."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.families import kernels_made
from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import VOCAB_SIZE, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONTEXT, NUM_REQUESTS = 256, 200
CONFIG = replace(
    test_served.CONFIG,
    device="cuda",
    model_impl="native",
    dtype="bfloat16",
    num_kv_blocks=1200,
    max_num_seqs=32,
    max_num_batched_tokens=128,
    max_model_len=CONTEXT,
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 2},
)
SIZES = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": CONTEXT}


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "gemma3"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    folder: Path = write(request.param, tmp_path_factory.mktemp("ready") / request.param, SIZES)
    with serving(CONFIG, folder) as found:
        yield found


async def test_the_first_200_requests_find_all_kernels(worker: Worker) -> None:
    random = np.random.default_rng(5)

    async def one(stub: Any) -> int:
        await asyncio.sleep(float(random.random()) * 2)
        num_prompt = int(random.choice([1, 2, 7, 40, 127, 128, 129, 200]))
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_token_ids=random.integers(3, VOCAB_SIZE, num_prompt).tolist(),
            sampling=types_pb2.SamplingParams(
                max_tokens=int(random.integers(1, 40)), **KINDS[int(random.integers(len(KINDS)))]
            ),
        )
        return sum([len(response.token_ids) async for response in stub.Generate(request)])

    async def together(engine: Engine, stub: Any) -> list[int]:
        return list(await asyncio.gather(*(one(stub) for _ in range(NUM_REQUESTS))))

    with kernels_made() as made:
        found, _ = await test_served.under_a_scheduler(worker, together, max_num_seqs=32)
    assert all(found)
    assert made == []
