"""Grants through the shell: no token differs, and changes take effect soon."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core import StepPlan
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.worker.pace import Pace
from simulator.workers.fake_worker import FakeModel
from simulator.workers.slots import token_at
from tests.pace import paced
from tests.scheduler_svc.core.builders import make_request, make_scheduler, plan_step, step

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
STEP = StepTime(base_s=0.002)


@pytest.fixture(autouse=True)
def _grants(request: pytest.FixtureRequest) -> None:
    if "make_cluster" in request.fixturenames:
        request.getfixturevalue("any_step_is_granted")


def generate(cluster: Any, num_tokens: int, seed: int = 7, timeout_s: float | None = None) -> Any:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=[1, 2, 3],
        sampling=types_pb2.SamplingParams(max_tokens=num_tokens, seed=seed),
    )
    return cluster.scheduler.Generate(request, timeout=timeout_s)


async def tokens_of(call: Any) -> list[int]:
    return [token async for response in call for token in response.token_ids]


def expected(num_tokens: int, seed: int = 7) -> list[int]:
    positions = np.arange(3, 3 + num_tokens)
    return token_at(np.full(num_tokens, seed, dtype=np.uint64), positions, 32000).tolist()


def granted(cluster: Any) -> list[StepPlan]:
    """The granted steps that were computed, newest first."""
    records = cluster.engine.groups[0].trace.newest_first()
    return [record.plan for record in records if record.plan.grant_id is not None]


async def in_a_grant(cluster: Any) -> None:
    """Waits until many granted steps are in flight."""
    await cluster.until(lambda: cluster.core.num_in_flight > 8)


@pytest.mark.parametrize(
    ("lookahead", "max_grant"), [(0, 0), (1, 0), (2, 0), (0, 8), (1, 1), (1, 3), (1, 8), (2, 64)]
)
async def test_outputs_are_the_same_however_far_steps_run_ahead(
    make_cluster: MakeCluster, lookahead: int, max_grant: int
) -> None:
    model = FakeModel(num_blocks=30, block_size=4, max_model_len=64)  # some are preempted
    options = {"lookahead": lookahead, "max_grant": max_grant, "state_check_interval": 5}
    async with make_cluster(model, max_num_seqs=4, **options) as cluster:
        calls = []
        for seed in range(12):
            calls.append(asyncio.create_task(tokens_of(generate(cluster, 8 + 3 * seed, seed))))
            await asyncio.sleep(0.004)
        found = await asyncio.gather(*calls)
        assert bool(granted(cluster)) is (max_grant > 1)
        assert cluster.engine.groups[0].num_recoveries == 0
        assert cluster.core.view.num_free_blocks == 29
    assert found == [expected(8 + 3 * seed, seed) for seed in range(12)]


async def test_an_arrival_ends_the_grant_and_is_computed_next(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = StepTime(base_s=paced(0.02))
    async with make_cluster(step_time=slow, max_grant=64) as cluster:
        first = asyncio.create_task(tokens_of(generate(cluster, 100)))
        await cluster.until(lambda: len(granted(cluster)) > 20)
        add, num_done = cluster.core.add, []

        def note(request: Any) -> Any:
            num_done.append(cluster.core.num_output_tokens)  # the first has one per step
            return add(request)

        monkeypatch.setattr(cluster.core, "add", note)
        second = generate(cluster, 3, seed=8)
        await second.read()
        plans = [record.plan for record in cluster.engine.groups[0].trace.newest_first()]
        begun = next(plan.step_id for plan in plans if plan.new_sequences)
        num_before = sum(plan.step_id < begun for plan in plans)
        assert num_before - num_done[0] < 20, "64 steps were granted"
        second.cancel()
        assert await first == expected(100)


async def test_a_deadline_is_told_in_the_middle_of_a_grant(make_cluster: MakeCluster) -> None:
    slow = StepTime(base_s=paced(0.02))
    async with make_cluster(step_time=slow, max_grant=64) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(generate(cluster, 5000, timeout_s=paced(0.5)))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        num_steps = cluster.worker.num_steps
        assert granted(cluster)
        await cluster.until(lambda: cluster.core.num_in_flight == 0)
        assert cluster.worker.num_steps - num_steps < 20, "64 steps were granted"
        assert cluster.core.internal_state.pool.num_free == 4095


async def test_a_cancelled_call_ends_the_grant(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEP, max_grant=8) as cluster:
        call = generate(cluster, 5000)
        await in_a_grant(cluster)
        num_planned = cluster.core.last_step_id
        call.cancel()
        await cluster.until(lambda: cluster.core.num_running == 0)
        await cluster.until(lambda: cluster.core.view.num_free_blocks == 4095)
        assert cluster.core.counters.num_steps < num_planned, "no step was taken back"
        assert await tokens_of(generate(cluster, 20)) == expected(20)


@pytest.mark.parametrize("fault", ["fail_steps", "short_steps"])
async def test_a_step_that_goes_wrong_in_a_grant_is_done_again(
    make_cluster: MakeCluster, fault: str
) -> None:
    async with make_cluster(step_time=STEP) as cluster:
        call = asyncio.create_task(tokens_of(generate(cluster, 200)))
        await in_a_grant(cluster)
        setattr(cluster.worker, fault, 1)
        assert await call == expected(200)
        assert cluster.engine.groups[0].num_recoveries == 1


async def test_equal_states_compare_equal_and_cost_nobody_anything(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(state_check_interval=1, max_grant=4) as cluster:
        calls = [tokens_of(generate(cluster, 60, seed)) for seed in range(10)]
        assert await asyncio.gather(*calls) == [expected(60, seed) for seed in range(10)]
        group = cluster.engine.groups[0]
        assert group.state_check.num_compared > 10
        assert group.num_recoveries == 0


@pytest.mark.parametrize("max_grant", [0, 8])
async def test_a_worker_whose_state_differs_is_lost_and_its_requests_recomputed(
    make_cluster: MakeCluster, max_grant: int
) -> None:
    async with make_cluster(state_check_interval=10, max_grant=max_grant) as cluster:
        cluster.worker.bad_states = 1
        assert await tokens_of(generate(cluster, 100)) == expected(100)
        group = cluster.engine.groups[0]
        assert group.num_recoveries == 1
        assert "the worker's state differs in slots 0" in group.why_lost


async def test_a_table_that_is_not_what_was_planned_is_found(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEP, state_check_interval=8) as cluster:
        call = asyncio.create_task(tokens_of(generate(cluster, 200)))
        await cluster.until(lambda: cluster.core.num_output_tokens > 5)
        slot = int(cluster.core.view.running_slots()[0])
        cluster.worker._slots._tables[0].block_ids[slot, 0] += 1
        assert await call == expected(200)
        assert f"differs in slots {slot}" in cluster.engine.groups[0].why_lost


async def test_a_slot_that_the_worker_should_have_freed_is_found(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(step_time=STEP, state_check_interval=8) as cluster:
        call = asyncio.create_task(tokens_of(generate(cluster, 200)))
        await cluster.until(lambda: cluster.core.num_output_tokens > 5)
        cluster.worker._slots._live[9] = True
        assert await call == expected(200)
        assert "the worker holds freed slots 9" in cluster.engine.groups[0].why_lost


@pytest.mark.parametrize(("duration_s", "num_steps"), [(0.0007, 8), (0.0045, 4), (0.012, 1)])
def test_long_steps_are_not_granted(duration_s: float, num_steps: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    step(scheduler)
    pace = Pace()
    assert pace.steps_to_grant(8) == 1, "nothing is measured"
    pace.stepped(plan_step(scheduler), 10.0, 10.0 + duration_s)
    assert pace.steps_to_grant(8) == num_steps
