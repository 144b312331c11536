"""Workers that hang, fall silent or lose frames: detected in time, without a wrong token."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.slots import token_at
from tests.pace import paced, patience

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
NUM_TOKENS = 40
SILENCE_S = paced(1.0)
LONGEST_SILENCE_S = 5 * SILENCE_S  # where heartbeats come late, as docs/failures.md says
IMPATIENT = {"heartbeat_timeout_s": SILENCE_S, "step_timeout_s": paced(0.5)}


async def generate(cluster: Any, seed: int = 7) -> list[int]:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=[1, 2, 3],
        sampling=types_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=seed),
    )
    return [t async for response in cluster.scheduler.Generate(request) for t in response.token_ids]


def expected(seed: int = 7) -> list[int]:
    positions = np.arange(3, 3 + NUM_TOKENS)
    return token_at(np.full(NUM_TOKENS, seed, dtype=np.uint64), positions, 32000).tolist()


async def test_an_idle_worker_is_not_lost(make_cluster: MakeCluster) -> None:
    async with make_cluster(**IMPATIENT) as cluster:
        await asyncio.sleep(2 * SILENCE_S)
        assert await generate(cluster) == expected()
        assert cluster.engine.groups[0].num_recoveries == 0


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_worker_that_falls_silent_is_lost_and_attached_again(
    make_cluster: MakeCluster, is_busy: bool
) -> None:
    steps = StepTime(base_s=0.01)
    async with make_cluster(step_time=steps, heartbeat_timeout_s=SILENCE_S) as cluster:
        group, running = cluster.engine.groups[0], None
        if is_busy:
            running = asyncio.create_task(generate(cluster))
            await cluster.until(lambda: cluster.core.num_output_tokens > 5)
        began_s = time.monotonic()
        cluster.worker.is_silent = True
        await cluster.until(lambda: group.num_recoveries)
        assert 0.7 * SILENCE_S < time.monotonic() - began_s < LONGEST_SILENCE_S + patience(1)
        assert "no message" in group.why_lost
        cluster.worker.is_silent = False
        assert await (running or generate(cluster)) == expected()


async def test_a_step_that_hangs_is_lost_although_heartbeats_come(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(**IMPATIENT) as cluster:
        assert await generate(cluster) == expected()  # now steps are measured
        group = cluster.engine.groups[0]
        cluster.worker.hang_steps = 1
        began_s = time.monotonic()
        assert await generate(cluster) == expected()
        assert 0.8 * IMPATIENT["step_timeout_s"] < time.monotonic() - began_s < patience(3)
        assert group.num_recoveries == 1


async def test_a_long_step_is_no_hang(make_cluster: MakeCluster) -> None:
    steps = StepTime(base_s=0.6)  # longer than --step-timeout-s, as each of them is
    times = {"heartbeat_timeout_s": SILENCE_S, "step_timeout_s": 0.2}
    async with make_cluster(step_time=steps, **times) as c:
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_token_ids=[1, 2, 3], sampling=types_pb2.SamplingParams(max_tokens=5, seed=7)
        )
        tokens = [t async for r in c.scheduler.Generate(request) for t in r.token_ids]
        assert c.engine.groups[0].num_recoveries == 0
    assert tokens == expected()[:5]
