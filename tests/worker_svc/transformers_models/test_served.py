"""Models that transformers computes, under a scheduler: tokens equal the library's own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.core import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from tests.pace import patience
from tests.scheduler_svc.conftest import service_config
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, serving
from tests.worker_svc.transformers_models.families import (
    HYBRIDS,
    NAMES,
    VOCAB_SIZE,
    Oracle,
    write,
)
from wire.server import SERVER_OPTIONS, bind
from worker_svc.config import WorkerConfig

NUM_TOKENS = 10
LENGTHS = (3, 17, 33, 40)  # of prompts: below a window, above a chunk, at the edges of blocks
# Blocks of 4 tokens: the longest sequence has 13, and all of them have no room.
CONFIG = replace(
    WORKER_CONFIG,
    model_impl="transformers",
    block_size=4,
    num_kv_blocks=20,
    max_num_seqs=8,
    max_num_batched_tokens=16,  # longer prompts are computed in chunks
    max_model_len=64,
)
# Where each sequence has more tables, or its windows alone.
NUM_BLOCKS = {"gemma4": 24, "gemma4_moe": 24, "llama4": 17}
Disturb = Callable[[Engine], Awaitable[None]]
HAVE_STATES = {*HYBRIDS, "qwen3_5_vl"}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's checkpoint in a worker, and the tokens that it should give."""

    name: str
    worker: Worker
    prompts: list[list[int]]
    wanted: list[list[int]]


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name = request.param
    folder = write(name, tmp_path_factory.mktemp("families") / name)
    config = replace(CONFIG, num_kv_blocks=NUM_BLOCKS.get(name, CONFIG.num_kv_blocks))
    with served(name, folder, config) as found:
        yield found


@contextmanager
def served(
    name: str, folder: Path, config: WorkerConfig, twin: Path | None = None
) -> Iterator[Family]:
    """A folder's model in a worker, and its tokens by transformers, or those of its twin."""
    oracle = Oracle(name, twin or folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = [oracle(prompt, NUM_TOKENS) for prompt in prompts]
    assert oracle.smallest_lead > 1e-4, "another draw of weights would have clearer winners"
    with serving(config, folder) as worker:
        yield Family(name, worker, prompts, wanted)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist()


async def test_one_at_a_time_and_again_after_a_cached_prefix(family: Family) -> None:
    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [await generate(stub, p) for prompt in family.prompts for p in (prompt, prompt)]

    found, engine = await under_a_scheduler(family.worker, each)
    assert found == [tokens for wanted in family.wanted for tokens in (wanted, wanted)]
    num_hits = engine.groups[0].core.counters.prefix_hit_tokens
    assert (num_hits > 0) is (family.name not in HAVE_STATES)


async def test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker(family: Family) -> None:
    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        prompts = [*family.prompts, *family.prompts]
        calls = [asyncio.create_task(generate(stub, prompt)) for prompt in prompts]
        (group,) = engine.groups
        while not group.core.view.num_preemptions:
            assert not all(call.done() for call in calls)
            _preempt_one(group.core)  # where windows leave room for all, none is otherwise
            await asyncio.sleep(0.001)
        session = family.worker.server._session
        session.end(session._stream, None)
        return await asyncio.gather(*calls)

    found, engine = await under_a_scheduler(family.worker, together)
    assert found == [*family.wanted, *family.wanted]
    (group,) = engine.groups
    assert group.num_recoveries == 1
    assert group.core.view.num_preemptions > 0


def _preempt_one(core: Scheduler) -> None:
    """Sends the last running sequence back to the queue, as for a more urgent one."""
    state = core.internal_state
    if state.running.sequences:
        state.preempt(state.running.sequences[-1])
        state.renew_running()


async def under_a_scheduler(
    worker: Worker, work: Callable[[Engine, Any], Awaitable[list[list[int]]]], **options: Any
) -> tuple[list[list[int]], Engine]:
    """Does the work at a scheduler of its own, whose recoveries and steps can be looked at."""
    return await scheduled(worker.server.port, work, **options)


async def scheduled(
    worker_port: int,
    work: Callable[[Engine, Any], Awaitable[list[list[int]]]],
    **options: Any,
) -> tuple[list[list[int]], Engine]:
    """Does the work as `under_a_scheduler` does, at the worker of a port."""
    engine = Engine(service_config(worker_port, **{"max_num_seqs": 8, **options}))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
    port = bind(server, "127.0.0.1:0", "test")
    await server.start()
    running = asyncio.create_task(engine.run())
    try:
        async with (
            asyncio.timeout(patience(60)),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            while not engine.is_ready:
                await asyncio.sleep(0.01)
            return await work(engine, scheduler_pb2_grpc.SchedulerServiceStub(channel)), engine
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def generate(
    stub: Any, prompt: list[int], num_tokens: int = NUM_TOKENS, **fields: Any
) -> list[int]:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=prompt,
        sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens),
        **fields,
    )
    found: list[int] = []
    async for response in stub.Generate(request):
        found += response.token_ids
    return found
