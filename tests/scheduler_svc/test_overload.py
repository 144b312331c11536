"""Overload, deadlines, policies and explanations on the real wire."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.config import parse
from scheduler_svc.core import Policy
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel
from tests.pace import paced
from tests.scheduler_svc.conftest import obey, pushback_s
from wire.columns import pack

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
STEPS, SLOW_STEPS = StepTime(base_s=0.004), StepTime(base_s=paced(0.02))
DEADLINE_S = round(paced(0.5), 3)


def request(request_id: str, max_tokens: int = 8, num_prompt: int = 4, **more: Any) -> Any:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=request_id,
        prompt_token_ids=range(1, num_prompt + 1),
        sampling=types_pb2.SamplingParams(max_tokens=max_tokens, seed=1),
        **more,
    )


async def finish(call: Any) -> int:
    """Number of tokens that a call received."""
    return sum([len(response.token_ids) async for response in call])


async def fill(
    cluster: Any, num_waiting: int, max_tokens: int = 12, num_running_steps: int | None = None
) -> list[Any]:
    """Starts one running request and `num_waiting` waiting ones, of max_tokens steps each.

    The running one takes `num_running_steps` steps instead, if given.
    """
    calls: list[Any] = []
    core = cluster.core
    num_before = core.num_accepted
    for index in range(num_waiting + 1):
        num_steps = max_tokens if index else num_running_steps or max_tokens
        calls.append(cluster.scheduler.Generate(request(f"r{index}", num_steps)))
        await cluster.until(lambda: core.num_accepted == num_before + len(calls))
        if not index:
            await cluster.until(lambda: core.num_running == 1)
    return calls


async def seconds_until(cluster: Any, holds: Callable[[], bool]) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await cluster.until(holds)
    return loop.time() - began_s


async def test_a_refused_call_says_when_to_come_again_and_then_finds_its_place(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(
        step_time=SLOW_STEPS, max_num_seqs=1, max_waiting_requests=3
    ) as cluster:
        assert await finish(cluster.scheduler.Generate(request("warm up"))) == 8
        calls = await fill(cluster, 3, num_running_steps=40)  # long enough for others to be refused
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(cluster.scheduler.Generate(request("late")))
        error = caught.value
        info = RetryInfo()
        status = rpc_status.from_call(error)
        assert status is not None and status.details[0].Unpack(info)
        delay_s = info.retry_delay.ToTimedelta().total_seconds()
        assert pushback_s(error) == pytest.approx(delay_s, abs=0.002)
        assert "3 requests wait" in str(error.details())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The next is admitted once the running one has made its 40 steps.
        took_s, _ = await asyncio.gather(
            seconds_until(cluster, lambda: cluster.core.num_waiting < 3), asyncio.sleep(delay_s)
        )
        assert took_s / 4 < delay_s < took_s * 4
        num_tokens, num_refused = await obey(
            lambda: finish(cluster.scheduler.Generate(request("late")))
        )
        assert num_tokens == 8
        assert [await finish(call) for call in calls] == [40, 12, 12, 12]
        seen = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    assert (seen.num_overloaded, seen.policy) == (1 + num_refused, "fair")
    assert seen.seconds_of_backlog == 0.0


async def test_the_backlog_is_about_the_time_it_then_takes(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=SLOW_STEPS, max_num_seqs=1) as cluster:
        before = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        assert not before.HasField("seconds_of_backlog")
        await finish(cluster.scheduler.Generate(request("warm up")))
        calls = await fill(cluster, 7, max_tokens=15)
        seen = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.gather(*map(finish, calls))
        took_s = loop.time() - began_s
    assert seen.seconds_of_backlog == pytest.approx(took_s, rel=0.5)


async def open_session(cluster: Any, **submit: Any) -> Any:
    call = cluster.scheduler.Session()
    message = scheduler_pb2.Submit(
        handle=1,
        request_id="session",
        prompt_token_ids=pack([1, 2, 3]),
        sampling=types_pb2.SamplingParams(max_tokens=4000, seed=1),
        **submit,
    )
    await call.write(scheduler_pb2.SessionRequest(submit=message))
    return call


async def end_of(call: Any) -> Any:
    async for response in call:
        if response.finished:
            call.cancel()
            return response.finished[0]
    raise AssertionError("the session ended without an end of its request")


async def test_a_session_hears_when_to_come_again(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEPS, max_num_seqs=1, max_waiting_requests=1) as cluster:
        calls = await fill(cluster, 1, max_tokens=200)
        end = await end_of(await open_session(cluster))
        for call in calls:
            call.cancel()
    assert end.status_code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert end.retry_after_s > 0


@pytest.mark.parametrize("num_ahead", [0, 1])
async def test_a_deadline_ends_a_request_wherever_it_is_and_says_where_its_time_went(
    make_cluster: MakeCluster, num_ahead: int
) -> None:
    async with make_cluster(step_time=STEPS, max_num_seqs=1) as cluster:
        calls = await fill(cluster, 0, max_tokens=4000) if num_ahead else []
        end = await end_of(await open_session(cluster, timeout_s=DEADLINE_S))
        core = cluster.core
        assert (core.num_running, core.num_waiting) == (num_ahead, 0)
        for call in calls:
            call.cancel()
        await cluster.until(lambda: core.view.num_free_blocks == 4095)
    assert end.status_code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert f"deadline of {DEADLINE_S:.3f} s" in end.message
    assert ("decode" in end.message) == (not num_ahead)
    assert "queue" in end.message
    assert core.num_expired == 1


async def test_a_deadline_holds_while_no_worker_is_there(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEPS) as cluster:
        call = await open_session(cluster, timeout_s=2 * DEADLINE_S)
        await cluster.until(lambda: cluster.core.num_running == 1)
        await cluster.worker_server.stop(None)
        end = await end_of(call)
    assert end.status_code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert "worker away" in end.message


async def test_the_deadline_of_a_call_frees_its_blocks(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEPS) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(cluster.scheduler.Generate(request("x", 4000), timeout=DEADLINE_S))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.until(lambda: not list(cluster.core.live()))
        await cluster.until(lambda: cluster.core.view.num_free_blocks == 4095)


async def test_the_more_urgent_call_is_answered_first(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=STEPS, max_num_seqs=1, policy=Policy.PRIORITY) as cluster:
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            await finish(cluster.scheduler.Generate(request(name, 10, priority=priority)))
            order.append(name)

        tasks = []
        for name, priority in (("first", 5), ("low", 9), ("middle", 5), ("urgent", -1)):
            tasks.append(asyncio.create_task(run(name, priority)))
            await cluster.until(lambda: cluster.core.num_accepted == len(tasks))
        await asyncio.gather(*tasks)
    assert order == ["urgent", "first", "middle", "low"]


async def test_a_tenant_name_that_is_too_long_is_refused_by_name(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(cluster.scheduler.Generate(request("x", tenant="ä" * 33)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tenant" in str(caught.value.details())


async def describe(cluster: Any, request_id: str) -> Any:
    return await cluster.debug.DescribeRequest(
        debug_pb2.DescribeRequestRequest(request_id=request_id)
    )


def total_s(spent: debug_pb2.TimeSpent) -> float:
    return sum(value for _, value in spent.ListFields())


async def test_the_parts_of_a_requests_time_add_up_to_its_age(make_cluster: MakeCluster) -> None:
    model = FakeModel(num_blocks=13, block_size=4, max_model_len=40)
    async with make_cluster(model, StepTime(base_s=0.003), max_num_seqs=3) as cluster:
        names = [f"r{index}" for index in range(6)]
        calls = [
            asyncio.create_task(finish(cluster.scheduler.Generate(request(name, 30))))
            for name in names
        ]
        phases: set[str] = set()
        while not all(call.done() for call in calls):
            for name in names:
                try:
                    seen = await describe(cluster, name)
                except grpc.aio.AioRpcError:  # it has ended, or has not started yet
                    continue
                assert total_s(seen.time_spent) == pytest.approx(seen.request.age_s, abs=1e-6)
                phases |= {field.name for field, _ in seen.time_spent.ListFields()}
            await asyncio.sleep(0.005)
        assert await asyncio.gather(*calls) == [30] * 6
    assert phases == {"queue_s", "prefill_s", "decode_s", "preempted_s"}


async def test_the_story_names_what_a_request_waited_for(make_cluster: MakeCluster) -> None:
    model = FakeModel(num_blocks=9, block_size=4, max_model_len=32)
    async with make_cluster(model, STEPS, max_num_seqs=2, queue_window=0) as cluster:
        calls = [cluster.scheduler.Generate(request("holds", 20))]
        await cluster.until(lambda: cluster.core.num_running == 1)
        calls.append(cluster.scheduler.Generate(request("large", 2, num_prompt=29)))
        await cluster.until(lambda: cluster.core.num_accepted == 2)
        calls.append(cluster.scheduler.Generate(request("behind", 2)))
        await cluster.until(lambda: cluster.core.num_accepted == 3)
        await asyncio.sleep(0.02)
        large, behind = await describe(cluster, "large"), await describe(cluster, "behind")
        for call in calls:
            call.cancel()
    assert any(
        line.startswith("step") and "waited: " in line and "short" in line for line in large.story
    ), large.story
    assert any("after 'large', which was" in line for line in behind.story), behind.story
    assert large.story[-1].startswith("now waiting: first in the queue")
    assert behind.story[-1] == "now waiting: after 1 request"


def test_the_options_of_policy_and_admission_are_read() -> None:
    options = "--policy fair --tenant-weight gold=4 --tenant-weight a=b=0.5 --max-waiting-tokens 9"
    config = parse([*options.split(), "--max-waiting-requests-per-tenant", "3"])
    assert config.policy is Policy.FAIR
    assert config.tenant_weights == (("gold", 4.0), ("a=b", 0.5))
    assert (config.max_waiting_tokens, config.max_waiting_requests_per_tenant) == (9, 3)


@pytest.mark.parametrize(
    "option",
    [
        "--policy lifo",
        "--tenant-weight gold",
        "--tenant-weight gold=0",
        "--queue-window -1",
        "--max-waiting-requests -1",
        "--priority-ageing-s 0",
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(option.split())
    name = option.split()[0].strip("-")
    message = capsys.readouterr().err.splitlines()[-1]
    assert name in message or name.replace("-", "_") in message


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ([], 512),
        (["--max-num-seqs", "4"], 16),
        (["--max-waiting-requests", "7"], 7),
        (["--max-waiting-requests", "0"], 0),
    ],
)
def test_the_queue_is_bounded_by_default(options: list[str], most: int) -> None:
    assert parse(options).max_waiting_requests == most
