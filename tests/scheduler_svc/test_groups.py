"""Two worker groups under one scheduler: placement, loss, return, and calls by request id."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.config import parse
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel, FakeWorker, start
from simulator.workers.slots import logprob_of, token_at
from tests.pace import paced
from tests.scheduler_svc.conftest import obey, pushback_s, start_again

Generate = scheduler_pb2.SchedulerServiceGenerateRequest
STEPS = StepTime(base_s=0.004)
NUM_TOKENS = 100


class Workers:
    """Two fake workers that can be stopped and restarted."""

    def __init__(self, *models: FakeModel) -> None:
        self.fakes = [FakeWorker(model, STEPS) for model in models]
        self.servers: list[grpc.aio.Server] = []
        self.ports: list[int] = []

    async def start(self) -> None:
        for fake in self.fakes:
            server, port = await start(fake, "127.0.0.1:0")
            self.servers.append(server)
            self.ports.append(port)

    async def kill(self, index: int) -> None:
        await self.servers[index].stop(None)

    async def revive(self, index: int) -> None:
        self.servers[index] = await start_again(self.fakes[index], self.ports[index])

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop(None)


@asynccontextmanager
async def two_groups(
    make_cluster: Any, *models: FakeModel, **options: Any
) -> AsyncIterator[tuple[Any, Workers]]:
    workers = Workers(*(models or (FakeModel(), FakeModel())))
    await workers.start()
    addresses = tuple(f"127.0.0.1:{port}" for port in workers.ports)
    try:
        async with make_cluster(workers=addresses, **options) as cluster:
            groups = cluster.engine.groups
            await cluster.until(lambda: all(group.core for group in groups))
            yield cluster, workers
    finally:
        await workers.stop()


def request(
    request_id: str, seed: int, num_prompt: int = 20, max_tokens: int = NUM_TOKENS, **more: Any
) -> Generate:
    sampling = types_pb2.SamplingParams(
        max_tokens=max_tokens, seed=seed, **more.pop("sampling", {})
    )
    return Generate(
        request_id=request_id, prompt_token_ids=range(1, num_prompt + 1), sampling=sampling, **more
    )


def expected(seed: int, num_prompt: int = 20, num_output: int = NUM_TOKENS) -> list[int]:
    positions = np.arange(num_prompt, num_prompt + num_output)
    return token_at(np.full(num_output, seed, dtype=np.uint64), positions, 32000).tolist()


async def run(cluster: Any, asked: Generate, timeout: float | None = None) -> tuple[list[int], Any]:
    token_ids: list[int] = []
    response = None
    async for response in cluster.scheduler.Generate(asked, timeout=timeout):
        token_ids += response.token_ids
    return token_ids, response


def num_running(cluster: Any) -> list[int]:
    return [group.core.num_running for group in cluster.engine.groups]


async def spread(cluster: Any, count: int = 8, **more: Any) -> list[Any]:
    """Starts requests without common prefixes, running on both groups."""
    calls = []
    for number in range(count):
        asked = request(f"r{number}", number, **more)
        asked.prompt_token_ids[0] = 1000 + number
        calls.append(asyncio.create_task(run(cluster, asked)))
        await cluster.until(lambda: sum(num_running(cluster)) == len(calls))
    return calls


async def test_requests_spread_over_the_groups(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, _):
        calls = await spread(cluster)
        assert num_running(cluster) == [4, 4]
        answers = await asyncio.gather(*calls)
    assert [tokens for tokens, _ in answers] == [expected(number) for number in range(8)]


async def test_a_request_goes_where_its_prefix_is(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, _):
        other = request("other", 1, max_tokens=4000)
        other.prompt_token_ids[0] = 999
        busy = cluster.scheduler.Generate(other)
        await cluster.until(lambda: num_running(cluster) == [1, 0])
        for number in range(3):
            _, end = await run(cluster, request(f"r{number}", 2, num_prompt=200, max_tokens=4))
            assert end.usage.cached_tokens == (192 if number else 0)
        first, second = (group.core for group in cluster.engine.groups)
        busy.cancel()
        assert (first.num_accepted, second.num_accepted) == (1, 3)
        await cluster.until(lambda: num_running(cluster) == [0, 0])
        await run(cluster, request("there again", 2, num_prompt=200, max_tokens=4))
        assert second.num_accepted == 4  # although both are idle and the first is preferred


async def test_the_requests_of_a_lost_worker_move_at_once_and_lose_nothing(
    make_cluster: Any,
) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        calls = await spread(cluster, sampling={"logprobs": 2})
        lost, other = cluster.engine.groups
        await cluster.until(lambda: lost.core.num_output_tokens > 40)
        await workers.kill(0)
        await cluster.until(lambda: not lost.is_ready)
        assert cluster.engine.is_ready
        # They wait for as long as the same worker might answer again: its connection may be lost.
        await cluster.until(lambda: lost.core.migration.num_migrated_out == 4)
        assert other.core.migration.num_migrated_in == 4
        assert not list(lost.core.live())
        answers = []
        for call in calls:
            answers.append(await call)
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    for number, (tokens, end) in enumerate(answers):
        assert tokens == expected(number)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (20, NUM_TOKENS)
        assert end.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert status.ready and status.num_accepted == status.num_finished == 8
    assert [group.ready for group in status.groups] == [False, True]
    assert [group.num_losses for group in status.groups] == [1, 0]
    assert status.groups[0].why_lost and status.groups[1].num_migrated_in == 4
    assert status.worker_address == status.groups[1].address
    assert status.num_output_tokens == 8 * NUM_TOKENS


async def test_logprobs_move_with_their_tokens(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        asked = request("r", 5, sampling={"logprobs": 1})
        got: list[Any] = []

        async def follow() -> None:
            async for response in cluster.scheduler.Generate(asked):
                got.extend(zip(response.token_ids, response.logprobs, strict=True))

        call = asyncio.create_task(follow())
        await cluster.until(lambda: len(got) > 10)
        await workers.kill(num_running(cluster).index(1))
        await call
    assert [token for token, _ in got] == expected(5)
    for token, logprobs in got:
        assert logprobs.logprob == pytest.approx(float(logprob_of(np.array([token]))[0][0]))


async def test_a_worker_that_returns_gets_new_work(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        first = cluster.engine.groups[0]
        calls = await spread(cluster, max_tokens=200)
        await workers.kill(0)
        await cluster.until(lambda: num_running(cluster) == [0, 8])
        await workers.revive(0)
        await cluster.until(lambda: first.is_ready)
        asked = request("new", 77)
        asked.prompt_token_ids[0] = 5000
        calls.append(asyncio.create_task(run(cluster, asked)))
        await cluster.until(lambda: first.core.num_running == 1)
        answers = await asyncio.gather(*calls)
    assert [len(tokens) for tokens, _ in answers] == [200] * 8 + [NUM_TOKENS]


async def test_without_any_worker_requests_wait_and_the_first_to_return_gets_all(
    make_cluster: Any,
) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        calls = await spread(cluster)
        await workers.kill(0)
        await workers.kill(1)
        await cluster.until(lambda: not cluster.engine.is_ready)
        late = asyncio.create_task(run(cluster, request("late", 50)))
        await cluster.until(lambda: sum(g.core.num_waiting for g in cluster.engine.groups) == 9)
        await workers.revive(1)
        answers = await asyncio.gather(*calls, late)
        assert [g.is_ready for g in cluster.engine.groups] == [False, True]
    seeds = [*range(8), 50]
    assert [tokens for tokens, _ in answers] == [expected(seed) for seed in seeds]


async def test_whom_no_other_group_can_hold_waits_for_the_own_one(make_cluster: Any) -> None:
    small = FakeModel(num_blocks=4)
    async with two_groups(make_cluster, FakeModel(), small) as (cluster, workers):
        call = asyncio.create_task(run(cluster, request("large", 3)))
        await cluster.until(lambda: num_running(cluster) == [1, 0])
        await workers.kill(0)
        await cluster.until(lambda: not cluster.engine.groups[0].is_ready)
        assert cluster.engine.groups[0].core.num_waiting == 1
        another = asyncio.create_task(run(cluster, request("large too", 4)))
        fits, _ = await run(cluster, request("small", 5, max_tokens=8))
        await workers.revive(0)
        answers = [(await call)[0], (await another)[0]]
    assert answers == [expected(3), expected(4)]
    assert fits == expected(5, num_output=8)


async def test_aborts_deadlines_and_closed_streams_find_requests_that_moved(
    make_cluster: Any,
) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        calls = []
        for number, timeout in enumerate((None, paced(3.0), None)):
            asked = request(f"r{number}", number, max_tokens=4000)
            calls.append(asyncio.create_task(run(cluster, asked, timeout=timeout)))
        await cluster.until(lambda: sum(num_running(cluster)) == 3)
        fuller = max((0, 1), key=lambda index: num_running(cluster)[index])
        await workers.kill(fuller)
        survivor = cluster.engine.groups[1 - fuller]
        await cluster.until(lambda: survivor.core.num_running == 3)
        answer = await cluster.scheduler.Abort(scheduler_pb2.AbortRequest(request_ids=["r0"]))
        assert list(answer.aborted) == ["r0"]
        _, end = await calls[0]
        assert end.finish_reason == types_pb2.FINISH_REASON_ABORT
        calls[2].cancel()
        await cluster.until(lambda: survivor.core.num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls[1]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        view = survivor.core.view
        await cluster.until(lambda: view.num_free_blocks == view.num_blocks)


async def test_a_request_id_is_unique_over_all_groups(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, _):
        call = cluster.scheduler.Generate(request("twin", 1, max_tokens=4000))
        await call.read()
        other = request("twin", 1)
        other.prompt_token_ids[0] = 900  # another group would suit it better
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(cluster, other)
        call.cancel()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_overload_is_only_when_every_group_is_full_and_the_place_is_kept(
    make_cluster: Any,
) -> None:
    options = {"max_num_seqs": 1, "max_waiting_requests": 1}
    async with two_groups(make_cluster, **options) as (cluster, _):
        for number in range(2):  # forecasts need measured steps
            await run(cluster, request(f"warm {number}", 1, max_tokens=6))
        calls = []
        for number in range(4):
            # The running requests take long enough for others to be refused meanwhile.
            asked = request(f"r{number}", number, max_tokens=120 + 20 * number if number < 2 else 8)
            calls.append(asyncio.create_task(run(cluster, asked)))
            await cluster.until(
                lambda: sum(g.core.num_accepted for g in cluster.engine.groups) == 2 + len(calls)
            )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(cluster, request("late", 9))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.sleep(pushback_s(caught.value))
        (tokens, _), num_refused = await obey(lambda: run(cluster, request("late", 9)))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        await asyncio.gather(*calls)
    assert tokens == expected(9)
    assert status.num_overloaded == 1 + num_refused


async def test_a_group_with_another_model_is_refused_by_name(make_cluster: Any) -> None:
    first, second = FakeModel(config_sha256="a" * 64), FakeModel(config_sha256="b" * 64)
    workers = Workers(first, second)
    await workers.start()
    addresses = tuple(f"127.0.0.1:{port}" for port in workers.ports)
    async with make_cluster(workers=addresses) as cluster:
        refused = next(g for g in cluster.engine.groups if not g.is_ready)
        await cluster.until(lambda: "is refused" in refused.reason)
        assert "it serves fake (config " in refused.reason
        tokens, _ = await run(cluster, request("r", 1))
    await workers.stop()
    assert tokens == expected(1)


async def test_the_debug_service_names_the_group(make_cluster: Any) -> None:
    async with two_groups(make_cluster) as (cluster, workers):
        calls = await spread(cluster, count=4, max_tokens=4000)
        addresses = [group.address for group in cluster.engine.groups]
        listed = await cluster.debug.ListRequests(debug_pb2.ListRequestsRequest())
        assert {r.request_id for r in listed.requests} == {"r0", "r1", "r2", "r3"}
        ages_s = [r.age_s for r in listed.requests]
        assert ages_s == sorted(ages_s, reverse=True)
        assert {r.worker_address for r in listed.requests} == set(addresses)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.debug.DumpBlockPool(debug_pb2.DumpBlockPoolRequest())
        assert addresses[1] in str(caught.value.details())
        pool = await cluster.debug.DumpBlockPool(
            debug_pb2.DumpBlockPoolRequest(worker_address=addresses[1])
        )
        assert pool.worker_address == addresses[1] and len(pool.blocks) >= 4
        steps = await cluster.debug.ListSteps(debug_pb2.ListStepsRequest(limit=50))
        assert {step.worker_address for step in steps.steps} == set(addresses)
        await workers.kill(0)
        await cluster.until(lambda: num_running(cluster) == [0, 4])
        moved = next(r.request_id for r in listed.requests if r.worker_address == addresses[0])
        described = await cluster.debug.DescribeRequest(
            debug_pb2.DescribeRequestRequest(request_id=moved)
        )
        for call in calls:
            call.cancel()
    assert described.request.worker_address == addresses[1]
    assert f"of worker {addresses[0]}: entered slot" in described.story[0]
    assert "entered slot" in described.story[1]


def test_each_worker_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(["--worker", "a:1", "--worker", "b:1"])
    assert config.workers == ("a:1", "b:1")
    assert parse([]).workers == ("127.0.0.1:50053",)
    with pytest.raises(SystemExit):
        parse(["--worker", "a:1", "--worker", "a:1"])
    assert "worker is a:1, a:1" in capsys.readouterr().err


async def test_siblings_are_placed_together_wherever_there_is_less_to_do(make_cluster: Any) -> None:
    """Their prompt is computed once, though the other worker is idle."""
    async with two_groups(make_cluster, enable_prefix_caching=False) as (cluster, _):
        asked = [
            request(f"r{seed}", seed, max_tokens=20, num_prompt=100, fork_group="outputs")
            for seed in range(4)
        ]
        answers = await asyncio.gather(*(run(cluster, one) for one in asked))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    assert [tokens for tokens, _ in answers] == [expected(s, 100, 20) for s in range(4)]
    assert status.num_forks == 3
    assert sorted(group.num_output_tokens for group in status.groups) == [0, 80]
