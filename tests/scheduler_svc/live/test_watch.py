"""LiveService: what a watcher is told is what there is, and it costs nothing without watchers."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import live_pb2, live_pb2_grpc, scheduler_pb2, types_pb2
from scheduler_svc.core import (
    CachePolicy,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from scheduler_svc.explain.trace import StepRecord
from scheduler_svc.live import service
from scheduler_svc.live.activity import MAX_BARS, RequestWatch, step_bars
from tests.pace import patience
from tests.scheduler_svc.conftest import Cluster
from wire.columns import UINT8, UINT32, unpack

MakeCluster = Callable[..., Any]


def small_core(max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=65,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=64,
            vocab_size=100,
            eos_token_ids=(1,),
        )
    )


def request(name: str, num_tokens: int = 8, **more: Any) -> Request:
    return Request(name, np.arange(2, 2 + num_tokens, dtype=np.int32), **more)


def step(core: Scheduler) -> StepPlan:
    plan = core.schedule()
    assert plan is not None
    ids = np.full(len(plan.sampled_slots), 7, dtype=np.int32)
    core.update(StepResult(plan.step_id, ids))
    return plan


def rows_of(told: live_pb2.LiveRequests) -> dict[int, dict[str, int]]:
    """The columns as rows, by number."""
    columns = {
        "phase": unpack(told.phases, UINT8),
        "tokens": unpack(told.num_tokens),
        "computed": unpack(told.num_computed_tokens),
        "blocks": unpack(told.num_blocks),
    }
    numbers = unpack(told.numbers, UINT32).tolist()
    assert {len(column) for column in columns.values()} == {len(numbers)}
    return {
        number: {name: int(column[at]) for name, column in columns.items()}
        for at, number in enumerate(numbers)
    }


def test_a_request_goes_through_its_phases_and_its_facts_are_told_twice() -> None:
    core, watch = small_core(), RequestWatch(100)
    core.add(request("a", 24, tenant="acme"))
    told = watch.look(core)
    (fact,) = told.facts
    assert (fact.request_id, fact.tenant, fact.num_prompt_tokens) == ("a", "acme", 24)
    assert not fact.HasField("num_cached_tokens")
    assert rows_of(told)[fact.number]["phase"] == live_pb2.LIVE_PHASE_QUEUE
    step(core)
    told = watch.look(core)
    assert told.facts[0].num_cached_tokens == 0
    row = rows_of(told)[fact.number]
    assert row == {"phase": live_pb2.LIVE_PHASE_PREFILL, "tokens": 24, "computed": 16, "blocks": 4}
    step(core)
    told = watch.look(core)
    assert not told.facts
    assert rows_of(told)[fact.number]["phase"] == live_pb2.LIVE_PHASE_DECODE
    core.worker_lost()
    row = rows_of(watch.look(core))[fact.number]
    assert row["phase"] == live_pb2.LIVE_PHASE_WORKER_AWAY
    assert (row["computed"], row["blocks"]) == (0, 0)
    core.abort("a")
    told = watch.look(core)
    assert (told.total, told.numbers) == (0, b"")


def test_more_requests_than_wanted_are_counted_and_those_that_run_come_first() -> None:
    core, watch = small_core(max_num_seqs=2), RequestWatch(3)
    for name in "abcdef":
        core.add(request(name, 4))
    step(core)
    told = watch.look(core)
    assert told.total == 6
    phases = [row["phase"] for row in rows_of(told).values()]
    assert len(phases) == 3 and phases[2] == live_pb2.LIVE_PHASE_QUEUE
    assert live_pb2.LIVE_PHASE_QUEUE not in phases[:2]


def test_a_watcher_of_many_short_requests_keeps_no_facts_of_those_that_ended() -> None:
    core, watch = small_core(), RequestWatch(100)
    for number in range(500):
        core.add(request(f"r{number}", 4))
        watch.look(core)
        core.abort(f"r{number}")
    assert len(watch._told) < 200


def test_many_steps_become_few_bars_and_lose_no_token() -> None:
    core = small_core()
    core.add(request("a", 24))
    records = []
    for _ in range(MAX_BARS + 3):
        if not core.num_running and not core.num_waiting:
            core.add(request(f"b{len(records)}", 10))
        records.append(StepRecord(step(core), 0.0, 0.001))
    bars = step_bars(records)
    assert 1 < len(bars) <= MAX_BARS
    assert sum(bar.num_steps for bar in bars) == len(records)
    tokens = sum(bar.num_prefill_tokens + bar.num_decode_tokens for bar in bars)
    assert tokens == sum(record.plan.num_tokens for record in records)
    assert sum(bar.duration_us for bar in bars) == pytest.approx(1000 * len(records), abs=len(bars))
    assert bars[-1].step_id == records[-1].plan.step_id
    assert step_bars([]) == []


async def watch(cluster: Cluster, **wanted: Any) -> Any:
    stub: Any = live_pb2_grpc.LiveServiceStub(cluster.channel)
    return stub.Watch(live_pb2.WatchRequest(**wanted), timeout=patience(20))


async def test_a_stream_shows_requests_blocks_and_steps_and_the_loss_of_the_worker(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        call = await watch(cluster, interval_s=0.05, max_cells=16)
        first = await call.read()
        assert first.status.ready and not first.groups[0].steps
        sampling = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
        generate = cluster.scheduler.Generate(
            scheduler_pb2.SchedulerServiceGenerateRequest(
                request_id="seen", prompt_token_ids=range(2, 40), sampling=sampling
            )
        )
        steps, most_used, names = 0, 0, set()
        while steps <= 20 or not most_used:
            (group,) = (await call.read()).groups
            steps += sum(bar.num_steps for bar in group.steps)
            cells = np.frombuffer(group.blocks.cells, dtype=np.uint8).reshape(-1, 3)
            assert len(cells) <= 16
            most_used = max(most_used, int(cells[:, 0].max(initial=0)))
            names |= {fact.request_id for fact in group.requests.facts}
        assert names == {"seen"}
        await cluster.worker_server.stop(None)
        while (message := await call.read()).status.ready:
            pass
        assert message.status.groups[0].num_losses == 1
        phases = unpack(message.groups[0].requests.phases, UINT8).tolist()
        assert phases in ([live_pb2.LIVE_PHASE_WORKER_AWAY], [])
        call.cancel()
        generate.cancel()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval_s", 0.01),
        ("interval_s", 61.0),
        ("interval_s", float("nan")),
        ("interval_s", -1.0),
        ("max_cells", 5000),
        ("max_requests", 1 << 31),
        ("most_sessions", 257),
    ],
)
async def test_a_number_out_of_bounds_is_refused_by_name(
    make_cluster: MakeCluster, field: str, value: float
) -> None:
    async with make_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (await watch(cluster, **{field: value})).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(field)


async def test_sessions_are_told_now_and_then_to_those_who_ask(make_cluster: MakeCluster) -> None:
    async with make_cluster(cache_policy=CachePolicy.SESSIONS) as cluster:
        sampling = types_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
        for turn in range(1, 4):
            generate = cluster.scheduler.Generate(
                scheduler_pb2.SchedulerServiceGenerateRequest(
                    request_id=f"turn {turn}",
                    prompt_token_ids=range(2, 2 + 40 * turn),
                    sampling=sampling,
                    session=types_pb2.SessionHint(session_id="of an agent"),
                )
            )
            async for _ in generate:
                pass
        call, other = [await watch(cluster, interval_s=0.05, most_sessions=most) for most in (8, 0)]
        told = []
        while len(told) < 2:
            message = await call.read()
            assert message.tells_sessions or not message.status.sessions
            if message.tells_sessions:
                told.append(message.status)
        assert told[1].uptime_s >= told[0].uptime_s + service.SESSIONS_EVERY_S
        ((one,), (again,)) = (status.sessions for status in told)
        assert (one.session_id, one.num_turns) == (again.session_id, again.num_turns)
        assert (one.session_id, one.num_turns, one.num_prompt_tokens) == ("of an agent", 3, 240)
        assert one.num_found_tokens and one.num_cached_tokens
        message = await other.read()
        assert not message.tells_sessions and not message.status.sessions
        call.cancel()
        other.cancel()


async def test_watchers_are_bounded_and_one_who_leaves_makes_room(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_WATCHERS", 1)
    async with make_cluster() as cluster:
        first = await watch(cluster)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (await watch(cluster)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        async with asyncio.timeout(patience(10)):
            while True:
                try:
                    await (await watch(cluster)).read()
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)


async def test_no_snapshot_is_taken_while_none_watches(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = service.Watcher.look
    monkeypatch.setattr(service.Watcher, "look", lambda self: (looks.append(1), look(self))[1])
    async with make_cluster() as cluster:
        call = await watch(cluster, interval_s=0.05)
        await call.read()
        call.cancel()
        await asyncio.sleep(0.3)
        before = len(looks)
        assert before
        await asyncio.sleep(0.3)
        assert len(looks) == before
