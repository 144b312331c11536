"""Worker groups found by name: they come and go under load, and no request notices."""

import asyncio
import logging
import socket
from typing import Any, cast

import grpc
import pytest

from scheduler_svc.discovery.members import Members
from scheduler_svc.discovery.names import NameWatch, resolve
from simulator.workers.fake_worker import FakeModel
from tests.pace import patience
from tests.scheduler_svc.discovery.stage import NUM_TOKENS, Stage, staged, undisturbed

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


def running(stage: Stage) -> dict[str, int]:
    return {
        group.address.rpartition(":")[0]: group.core.num_running if group.core else 0
        for group in stage.engine.groups
    }


async def ask_many(stage: Stage, count: int, first: int = 0) -> list[Any]:
    """Starts requests; waits until all run or wait."""
    before = stage.engine.groups[0].core
    assert before is not None
    calls = [stage.ask(seed) for seed in range(first, first + count)]
    await stage.until(lambda: sum(any_live(stage)) >= count or all(call.done() for call in calls))
    return calls


def any_live(stage: Stage) -> list[int]:
    return [sum(1 for _ in group.core.live()) for group in stage.engine.groups if group.core]


async def test_a_worker_that_appears_under_load_takes_requests() -> None:
    async with staged(A) as stage:
        calls = await ask_many(stage, 8)
        await stage.start_worker(B)
        stage.answers.hosts.add(B)
        await stage.until(lambda: stage.open_hosts == {A, B})
        calls += [stage.ask(seed) for seed in range(8, 16)]
        await stage.until(lambda: running(stage)[B] >= 4)
        await stage.finish(calls)
        status = await stage.status()
        assert {group.source for group in status.groups} == {
            f"--worker-dns workers.example:{stage.port}"
        }


async def test_a_worker_that_leaves_under_32_streams_loses_and_changes_nothing() -> None:
    async with staged(A, B, max_num_seqs=8) as stage:  # half of them wait
        calls = await ask_many(stage, 32)
        await stage.until(lambda: running(stage) == {A: 8, B: 8})
        leaving, worker = stage.group(A), stage.workers[A]
        stage.answers.hosts.remove(A)
        await stage.until(lambda: bool(leaving.why_drained))
        assert leaving.core is not None
        assert leaving.core.num_waiting == 0, "those that wait move at once"
        assert leaving.core.num_running > 0, "those that run go on"
        num_accepted = leaving.core.num_accepted
        late = [stage.ask(seed) for seed in range(32, 40)]
        await stage.until(lambda: not worker.is_attached)
        assert leaving.core.num_accepted == num_accepted, "it got a new request"
        assert leaving.num_recoveries == 0, "nothing had to be computed again"
        await stage.until(lambda: stage.hosts == {B})
        await stage.finish(calls + late)
        status = await stage.status()
        assert status.num_accepted == status.num_finished == 40
        assert status.num_output_tokens == 40 * NUM_TOKENS, "counts of the group that left are lost"


async def test_a_drained_worker_that_dies_is_computed_again_elsewhere() -> None:
    async with staged(A, B) as stage:
        calls = await ask_many(stage, 8)
        stage.answers.hosts.remove(A)
        await stage.until(lambda: bool(stage.group(A).why_drained))
        await stage.stop_worker(A)
        await stage.until(lambda: stage.hosts == {B})
        await stage.finish(calls)


async def test_the_only_worker_leaves_and_requests_wait_for_the_next_one() -> None:
    async with staged(A) as stage:
        calls = await ask_many(stage, 4)
        stage.answers.hosts = {B}  # an address without a process, so far
        await stage.until(lambda: stage.hosts == {A, B} and bool(stage.group(A).why_drained))
        late = stage.ask(4)
        await stage.until(lambda: sum(any_live(stage)) == 5 or all(c.done() for c in calls))
        await stage.until(lambda: A in stage.servers and not stage.workers[A].is_attached)
        await stage.stop_worker(A)
        assert not late.done() and not stage.engine.is_ready
        await stage.start_worker(B)
        await stage.finish([*calls, late])
        await stage.until(lambda: stage.hosts == {B})


async def test_flapping_answers_disturb_nothing() -> None:
    async with staged(A, B) as stage:
        calls = await ask_many(stage, 16)
        for _ in range(6):
            stage.answers.hosts = {A}
            await stage.until(lambda: bool(stage.hosts != {A, B} or stage.group(B).why_drained))
            stage.answers.hosts = {A, B}
            await stage.until(lambda: stage.hosts == {A, B} and not stage.group(B).why_drained)
        await stage.finish(calls)
        await stage.until(lambda: stage.open_hosts == {A, B})
        assert [group.num_recoveries for group in stage.engine.groups] == [0, 0]


async def test_an_answer_that_lacks_an_address_once_drains_nothing() -> None:
    async with staged(A, B) as stage:
        for _ in range(5):
            stage.answers.hosts = {A}
            seen = stage.answers.num_lookups
            await stage.until(lambda seen=seen: stage.answers.num_lookups > seen)
            stage.answers.hosts = {A, B}
            await stage.looked_up(1)
            if stage.hosts == {A, B} and not stage.group(B).why_drained:
                return  # one missing answer, seen at least once without a drain
    pytest.fail("each answer without the address drained it")


@pytest.mark.parametrize(
    "problem", [socket.gaierror(-3, "Temporary failure in name resolution"), None]
)
async def test_failed_and_empty_answers_keep_what_there_is_and_are_told_once(
    problem: OSError | None, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "scheduler_svc.discovery.names")
    async with staged(A) as stage:
        stage.answers.error, stage.answers.hosts = problem, set()
        await stage.looked_up(8)
        assert stage.open_hosts == {A}
        assert await stage.ask(1) == undisturbed(1)
        stage.answers.error, stage.answers.hosts = None, {A}
        await stage.looked_up()
    told = [record.getMessage() for record in caplog.records]
    what = "Temporary failure" if problem else "the answer is empty"
    assert len([line for line in told if what in line]) == 1
    assert len([line for line in told if "is answered again" in line]) == 1


async def test_a_lookup_that_hangs_stops_nothing_and_is_not_repeated() -> None:
    async with staged(A) as stage:
        stage.answers.may_answer.clear()
        await stage.until(lambda: stage.answers.num_running == 1)
        assert await stage.ask(1) == undisturbed(1)
        assert stage.answers.num_running == 1 and stage.open_hosts == {A}
        stage.answers.hosts = {A, B}
        await stage.start_worker(B)
        stage.answers.may_answer.set()
        await stage.until(lambda: stage.open_hosts == {A, B})


async def test_an_answer_at_the_moment_of_the_end_does_not_keep_it_from_ending() -> None:
    """A cancellation is easily lost where an answer has just come."""
    watch = NameWatch("workers.example:1", cast(Members, None), 3600.0)
    watch._pending = asyncio.get_running_loop().create_future()  # a lookup that runs
    following = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    watch._pending.set_result(frozenset())
    await asyncio.sleep(0)  # it has come, and is not followed yet
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(patience(5)):
            await following


async def test_without_an_address_the_scheduler_waits_and_says_so() -> None:
    async with staged() as stage:
        await stage.looked_up()
        status = await stage.status()
        assert not status.ready and status.reason == "no worker is known yet"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stage.ask(1)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await stage.start_worker(A)
        stage.answers.hosts = {A}
        await stage.until(lambda: stage.engine.is_ready)
        assert await stage.ask(1) == undisturbed(1)


async def test_an_address_with_another_process_is_attached_anew() -> None:
    async with staged(A) as stage:
        assert await stage.ask(1) == undisturbed(1)
        other = await stage.start_worker(A)
        other.epoch = 7  # another scheduler had this process
        await stage.until(lambda: other.is_attached)
        assert await stage.ask(2) == undisturbed(2)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (FakeModel(config_sha256="b" * 64), "it serves fake (config bbbbbbbbbbbb)"),
        (FakeModel(block_size=32), "its block_size is 32, that of worker"),
        (FakeModel(quantization="fp8"), "its quantization is fp8, that of worker"),
        (FakeModel(kv_dtype="fp8_e4m3"), "its kv_dtype is fp8_e4m3, that of worker"),
    ],
)
async def test_what_differs_is_refused_by_name_and_disturbs_no_other(
    model: FakeModel, what: str
) -> None:
    async with staged(A) as stage:
        calls = await ask_many(stage, 4)
        await stage.start_worker(B, model)
        stage.answers.hosts.add(B)
        await stage.until(lambda: B in stage.hosts and what in stage.group(B).reason)
        (refused,) = [g for g in (await stage.status()).groups if g.address == stage.address(B)]
        assert what in refused.reason and not refused.ready
        await stage.finish(calls)
        await stage.start_worker(B)  # put right
        await stage.until(lambda: stage.open_hosts == {A, B})


async def test_one_worker_under_two_addresses_is_one_group() -> None:
    async with staged(A) as stage:
        twin = await stage.start_worker(B)
        twin.incarnation = stage.workers[A].incarnation
        stage.answers.hosts.add(B)
        await stage.until(
            lambda: B in stage.hosts and "by another address" in stage.group(B).reason
        )
        await stage.looked_up()
        assert stage.open_hosts == {A} and twin.epoch == 0
        assert await stage.ask(1) == undisturbed(1)


async def test_256_addresses_are_attached_compute_and_leave_at_once() -> None:
    hosts = [f"127.0.1.{number}" for number in range(128)] + [
        f"127.0.2.{number}" for number in range(128)
    ]
    async with staged(*hosts) as stage:
        calls = await ask_many(stage, 32)
        used = [g for g in stage.engine.groups if g.core is not None and g.core.num_accepted]
        stage.answers.hosts = set(hosts[:1])
        await stage.finish(calls)
        assert len(used) > 16, "requests do not spread"
        await stage.until(lambda: stage.hosts == {hosts[0]})
        assert (await stage.status()).num_finished == 32


async def test_255_addresses_without_a_process_do_not_keep_one_from_serving() -> None:
    async with staged(A) as stage:
        stage.answers.hosts |= {f"127.0.3.{number}" for number in range(255)}
        await stage.until(lambda: len(stage.hosts) == 256)
        await stage.finish([stage.ask(seed) for seed in range(16)])


def test_names_of_this_machine_are_looked_up_with_brackets_around_ipv6() -> None:
    assert "127.0.0.1:50053" in resolve("127.0.0.1", 50053)
    assert resolve("::1", 50053) == {"[::1]:50053"}
    with pytest.raises(OSError, match=r"too long|label|[Nn]ame"):
        resolve("a" * 300, 50053)
