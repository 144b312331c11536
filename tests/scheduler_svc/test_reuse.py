"""Reuse of KV over the wire: salts, forks and swapping; and a changed priority."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core import Policy, Preemption
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.engine import Engine
from simulator.workers.fake_worker import FakeModel, FakeWorker, start
from simulator.workers.slots import token_at
from tests.pace import patience
from tests.scheduler_svc.conftest import service_config
from wire.columns import pack

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]


async def cached_tokens(cluster: Any, **fields: Any) -> int:
    """Number of cached tokens that a request with a prompt of 100 tokens finds."""
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=range(1, 101), sampling=types_pb2.SamplingParams(max_tokens=2), **fields
    )
    return [r async for r in cluster.scheduler.Generate(request)][-1].usage.cached_tokens


async def test_a_prefix_is_found_under_its_salt_alone(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        salts = ["red", "blue", "", "red", "blue", ""]
        found = [await cached_tokens(cluster, cache_salt=salt) for salt in salts]
    assert found == [0, 0, 0, 96, 96, 96]


async def test_opting_out_neither_finds_nor_leaves_a_prefix(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        skips = [True, False, True, False]
        found = [await cached_tokens(cluster, skip_prefix_cache=skip) for skip in skips]
    assert found == [0, 0, 0, 96]


async def test_a_session_carries_both(make_cluster: MakeCluster) -> None:
    def submits() -> Any:
        for handle, (salt, skips) in enumerate([("red", False), ("red", True), ("red", False)]):
            submit = scheduler_pb2.Submit(
                handle=handle,
                request_id=f"r{handle}",
                prompt_token_ids=pack([*range(1, 101)]),
                sampling=types_pb2.SamplingParams(max_tokens=1),
                cache_salt=salt,
                skip_prefix_cache=skips,
            )
            yield scheduler_pb2.SessionRequest(submit=submit)

    async with make_cluster(lookahead=0) as cluster:
        session = cluster.scheduler.Session()
        found = []
        for request in submits():
            await session.write(request)
            while not (response := await session.read()).finished:
                pass
            found.append(response.finished[0].usage.cached_tokens)
        await session.done_writing()
    assert found == [0, 0, 96]


async def test_resetting_the_prefix_cache_forgets_what_was_computed(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        await cached_tokens(cluster)
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        assert status.num_cached_blocks == 6
        request = scheduler_pb2.ResetPrefixCacheRequest()
        assert (await cluster.scheduler.ResetPrefixCache(request)).num_blocks == 6
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        assert status.num_cached_blocks == 0
        assert [await cached_tokens(cluster) for _ in range(2)] == [0, 96]


async def test_a_salt_that_is_too_long_is_refused_by_name(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cached_tokens(cluster, cache_salt="ä" * 129)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cache_salt" in (caught.value.details() or "")


async def test_a_request_made_more_urgent_runs_first(make_cluster: MakeCluster) -> None:
    ended: list[str] = []

    async def run(cluster: Any, name: str, num_tokens: int) -> None:
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling=types_pb2.SamplingParams(max_tokens=num_tokens),
            priority=1,
        )
        async for _ in cluster.scheduler.Generate(request):
            pass
        ended.append(name)

    slow = StepTime(base_s=0.01)
    options = {"policy": Policy.PRIORITY, "max_num_seqs": 1}
    async with make_cluster(step_time=slow, **options) as cluster, asyncio.TaskGroup() as tasks:
        for number, name in enumerate(["a", "b", "c"]):
            tasks.create_task(run(cluster, name, 20))
            core = cluster.engine.groups[0].core
            await cluster.until(lambda c=core, n=number: len(list(c.live())) == n + 1)
        request = scheduler_pb2.SetPriorityRequest(request_id="c", priority=0)
        await cluster.scheduler.SetPriority(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.scheduler.SetPriority(
                scheduler_pb2.SetPriorityRequest(request_id="missing")
            )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert ended == ["c", "a", "b"]


async def test_a_policy_without_priorities_refuses_to_change_one(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.scheduler.SetPriority(scheduler_pb2.SetPriorityRequest(request_id="a"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "fair" in (caught.value.details() or "")


async def test_what_was_swapped_out_goes_on_without_a_token_lost(make_cluster: MakeCluster) -> None:
    model = FakeModel(num_blocks=9, block_size=4, max_model_len=32, num_host_blocks=32)
    async with make_cluster(model, max_num_seqs=4, preemption=Preemption.SWAP) as cluster:
        requests = [
            scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_token_ids=range(1, 5),
                sampling=types_pb2.SamplingParams(max_tokens=24, seed=seed),
                cache_salt=str(seed),
            )
            for seed in range(4)
        ]
        answers = await asyncio.gather(*(tokens_of(cluster, request) for request in requests))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    for seed, token_ids in enumerate(answers):
        seeds = np.full(24, seed, dtype=np.uint64)
        assert token_ids == token_at(seeds, np.arange(4, 28), 32000).tolist()
    assert status.preemption == "swap" and status.num_preemptions > 0
    assert 0 < status.num_swapped_in_blocks <= status.num_swapped_out_blocks
    came_or_dropped = status.num_swapped_in_blocks + status.num_swapped_dropped_blocks
    assert came_or_dropped == status.num_swapped_out_blocks, "nothing is left on the host"
    assert status.num_free_host_blocks == status.num_host_blocks == 32
    # 16 prompt tokens, and one per resumed request: swapped KV is not computed again.
    assert status.num_prefill_tokens <= 16 + status.num_preemptions


async def test_a_worker_without_host_blocks_is_refused_for_swapping() -> None:
    worker = FakeWorker()
    server, port = await start(worker, "127.0.0.1:0")
    engine = Engine(service_config(port, preemption=Preemption.SWAP))
    running = asyncio.create_task(engine.run())
    async with asyncio.timeout(patience(10)):
        while "host blocks" not in engine.reason:
            await asyncio.sleep(0.01)
    assert not engine.is_ready
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)


async def test_siblings_compute_their_prompt_once(make_cluster: MakeCluster) -> None:
    """Without the prefix cache, which would share the prompt as well."""
    async with make_cluster(enable_prefix_caching=False) as cluster:
        requests = [
            scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_token_ids=range(1, 301),
                sampling=types_pb2.SamplingParams(max_tokens=20, seed=seed),
                fork_group="outputs",
            )
            for seed in range(4)
        ]
        answers = await asyncio.gather(*(tokens_of(cluster, request) for request in requests))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    for seed, token_ids in enumerate(answers):
        seeds = np.full(20, seed, dtype=np.uint64)
        assert token_ids == token_at(seeds, np.arange(300, 320), 32000).tolist()
    assert status.num_forks == 3
    assert status.num_prefill_tokens == 300 + 3  # each computes its last prompt token again
    assert status.num_free_blocks == status.num_blocks


async def tokens_of(cluster: Any, request: Any) -> list[int]:
    return [token async for r in cluster.scheduler.Generate(request) for token in r.token_ids]
