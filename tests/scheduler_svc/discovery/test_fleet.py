"""Registration, operators, and workers that say that they end."""

import asyncio
from typing import Any

import grpc
import pytest

from pagewire.v1 import fleet_pb2
from tests.pace import patience
from tests.scheduler_svc.discovery.stage import NUM_TOKENS, Stage, staged, undisturbed

A, B = "127.0.0.2", "127.0.0.3"


async def register(stage: Stage, host: str) -> float:
    worker = stage.workers[host]
    request = fleet_pb2.RegisterRequest(address=stage.address(host), incarnation=worker.incarnation)
    return float((await stage.registry.Register(request)).lease_s)


async def deregister(stage: Stage, host: str, incarnation: int) -> None:
    await stage.registry.Deregister(
        fleet_pb2.DeregisterRequest(address=stage.address(host), incarnation=incarnation)
    )


async def operate(stage: Stage, what: str, host: str) -> None:
    request = getattr(fleet_pb2, f"{what}Request")(address=stage.address(host))
    await getattr(stage.registry, what)(request)


def live_on(stage: Stage, host: str) -> int:
    core = stage.group(host).core
    return 0 if core is None else len(list(core.live()))


# --- registration --------------------------------------------------------------------------------


async def test_a_registered_worker_takes_load_and_leaves_when_it_deregisters() -> None:
    async with staged(A, B, is_named=False) as stage:
        await register(stage, A)
        await stage.until(lambda: stage.open_hosts == {A})
        calls = [stage.ask(seed) for seed in range(8)]
        await stage.until(lambda: live_on(stage, A) == 8)
        await register(stage, B)
        await stage.until(lambda: stage.open_hosts == {A, B})
        calls += [stage.ask(seed) for seed in range(8, 32)]
        await stage.until(lambda: live_on(stage, B) >= 8)
        await deregister(stage, A, stage.workers[A].incarnation)
        await stage.until(lambda: stage.hosts == {B})
        await stage.finish(calls)
        assert [group.source for group in (await stage.status()).groups] == ["registered"]


async def test_a_lease_that_is_not_renewed_ends_but_not_that_of_an_attached_worker() -> None:
    async with staged(A, B, is_named=False, registration_lease_s=0.5) as stage:
        assert await register(stage, A) == 0.5
        await register(stage, B)
        await stage.until(lambda: stage.open_hosts == {A, B})
        await stage.stop_worker(B)
        await stage.until(lambda: stage.hosts == {A})
        assert await stage.ask(1) == undisturbed(1)
        assert stage.open_hosts == {A}, "its stream is a sign of life"


async def test_an_earlier_process_cannot_deregister_the_one_after_it() -> None:
    async with staged(A, is_named=False) as stage:
        await register(stage, A)
        before = stage.workers[A].incarnation
        await stage.start_worker(A)
        await register(stage, A)
        await deregister(stage, A, before)
        await stage.until(lambda: stage.open_hosts == {A})
        assert not stage.group(A).why_drained


@pytest.mark.parametrize("address", ["", "worker", "worker:0", "worker:65536", ":1", "w\n:1"])
async def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    async with staged() as stage:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stage.registry.Register(fleet_pb2.RegisterRequest(address=address))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "address: " in str(refused.value.details())
        assert not stage.engine.groups


async def test_without_the_option_a_registration_is_refused_with_its_name() -> None:
    async with staged(A, is_named=False, accept_registrations=False) as stage:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await register(stage, A)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--accept-registrations" in str(refused.value.details())


async def test_registrations_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.discovery.members.MAX_MEMBERS", 16)
    async with staged(is_named=False, registration_lease_s=3600.0) as stage:
        asked = [
            stage.registry.Register(fleet_pb2.RegisterRequest(address=f"127.9.0.1:{port}"))
            for port in range(2000, 2020)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
        assert len(refused) == 20 - 16
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


# --- operators -----------------------------------------------------------------------------------


async def test_an_operators_drain_holds_against_the_name_until_it_is_taken_back() -> None:
    async with staged(A, B) as stage:
        calls = [stage.ask(seed) for seed in range(16)]
        await stage.until(lambda: live_on(stage, A) + live_on(stage, B) == 16)
        await operate(stage, "DrainWorker", A)
        await stage.until(lambda: not stage.workers[A].is_attached)
        await stage.looked_up()
        assert stage.hosts == {A, B} and stage.open_hosts == {B}
        drained = next(g for g in (await stage.status()).groups if g.address == stage.address(A))
        assert drained.draining == "an operator has drained it"
        await operate(stage, "AddWorker", A)
        await stage.until(lambda: stage.open_hosts == {A, B})
        await stage.finish(calls)


async def test_an_operator_adds_and_removes_a_group() -> None:
    async with staged(A, B, is_named=False) as stage:
        for host in (A, B):
            await operate(stage, "AddWorker", host)
        await stage.until(lambda: stage.open_hosts == {A, B})
        await operate(stage, "RemoveWorker", A)
        await stage.until(lambda: stage.hosts == {B})
        await operate(stage, "AddWorker", A)
        await stage.until(lambda: stage.open_hosts == {A, B})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operate(stage, "DrainWorker", "127.0.0.99")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


# --- workers that end ----------------------------------------------------------------------------


async def test_a_worker_that_says_it_ends_gets_nothing_new_and_ends_when_it_is_empty() -> None:
    async with staged(A, B, max_num_seqs=8) as stage:
        calls = [stage.ask(seed) for seed in range(32)]
        await stage.until(lambda: live_on(stage, A) >= 12 and live_on(stage, B) >= 12)
        leaving, worker = stage.group(A), stage.workers[A]
        worker.drain()
        await stage.until(lambda: bool(leaving.why_drained))
        assert leaving.core is not None and leaving.core.num_waiting == 0
        await stage.until(lambda: not worker.is_attached)
        assert leaving.num_recoveries == 0 and stage.open_hosts == {B}
        # The next process at the address is attached and takes requests.
        await stage.start_worker(A)
        await stage.until(lambda: stage.open_hosts == {A, B})
        await stage.finish(calls)


async def test_workers_are_replaced_one_by_one_under_32_streams() -> None:
    async with staged(A, B, max_num_seqs=8) as stage:
        calls: list[Any] = []

        async def keep_busy() -> None:
            for seed in range(96):
                calls.append(stage.ask(seed))
                await stage.until(lambda: sum(not call.done() for call in calls) < 32)

        busy = asyncio.create_task(keep_busy())
        await stage.until(lambda: len(calls) >= 32)
        for host in (A, B):
            worker = stage.workers[host]
            worker.drain()
            await stage.until(lambda worker=worker: not worker.is_attached)
            await stage.start_worker(host)
            await stage.until(lambda: stage.open_hosts == {A, B})
        await busy
        await stage.finish(calls)
        assert [group.num_recoveries for group in stage.engine.groups] == [0, 0]


async def test_the_only_worker_ends_and_new_requests_wait_for_the_next_process() -> None:
    async with staged(A) as stage:
        running = [stage.ask(seed) for seed in range(4)]
        worker, group = stage.workers[A], stage.group(A)
        await stage.until(lambda: group.core is not None and group.core.num_running == 4)
        worker.drain()
        await stage.until(lambda: bool(group.why_drained))
        late = [stage.ask(seed) for seed in range(4, 8)]
        await stage.finish(running)
        await stage.until(lambda: not worker.is_attached)
        assert live_on(stage, A) == 4 and not any(call.done() for call in late)
        assert not stage.engine.is_ready and "shutting down" in stage.engine.reason
        await stage.start_worker(A)
        await stage.finish(late, first_seed=4)


async def test_a_worker_that_ends_before_its_requests_do_loses_none_of_them() -> None:
    async with staged(A, B) as stage:
        calls = [stage.ask(seed) for seed in range(16)]
        await stage.until(lambda: live_on(stage, A) >= 4)
        stage.workers[A].drain()
        await stage.until(lambda: bool(stage.group(A).why_drained))
        assert live_on(stage, A) >= 1
        await stage.stop_worker(A)  # its drain time is up
        await stage.finish(calls)
        assert sum(g.num_output_tokens for g in (await stage.status()).groups) == 16 * NUM_TOKENS


async def test_a_deadline_and_an_abort_find_requests_that_wait_without_a_worker() -> None:
    async with staged(A) as stage:
        stage.workers[A].drain()
        await stage.until(lambda: bool(stage.group(A).why_drained))
        call = stage.ask(1)
        await stage.until(lambda: live_on(stage, A) == 1)
        assert stage.engine.abort_and_tell("r1")
        assert await asyncio.wait_for(call, patience(5)) == []
