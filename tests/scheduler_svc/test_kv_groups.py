"""Workers with several KV groups: on the wire, in their descriptions, and by versions."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from pagewire.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.config import parse
from scheduler_svc.core import KvGroup
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core_config import check_successor, core_config
from scheduler_svc.worker.served import Served, WrongWorker
from simulator.workers.fake_worker import FakeModel, FakeWorker, describe, start
from tests.pace import patience
from tests.scheduler_svc.test_groups import expected, request, run
from wire.versions import MINOR_WITH_KV_GROUPS, STEP_MAJOR, STEP_MINOR, kv_groups_problem

CONFIG = parse(["--worker", "127.0.0.1:1"])
ONE = FakeModel()
GROUPS = (KvGroup(16), KvGroup(32), KvGroup(16, window=40))
SEVERAL = replace(ONE, kv_groups=GROUPS)


# --- over the wire -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv_groups",
    [GROUPS, (KvGroup(16, window=24),), (KvGroup(16, window=24), KvGroup(32))],
    ids=["three", "a window", "a window first"],
)
async def test_requests_run_on_a_worker_with_groups(
    kv_groups: tuple[KvGroup, ...], make_cluster: Any
) -> None:
    """The fake worker checks every table of every step."""
    model = replace(ONE, kv_groups=kv_groups, num_blocks=60, max_model_len=256)
    async with make_cluster(model, state_check_interval=4, max_grant=8) as cluster:
        asked = [request(f"r{n}", n, num_prompt=40, max_tokens=60) for n in range(6)]
        answers = await asyncio.gather(*(run(cluster, one) for one in asked))
        core = cluster.engine.groups[0].core
        check_invariants(core)
        assert core.config.kv_groups == kv_groups
        assert core.view.num_preemptions or len(kv_groups) < 3, "blocks were to run out"
        num_compared = cluster.engine.groups[0].state_check.num_compared
        assert bool(num_compared) == (kv_groups[0].window is None)
        assert cluster.engine.groups[0].num_recoveries == 0
    assert [tokens for tokens, _ in answers] == [expected(n, 40, 60) for n in range(6)]


async def test_the_next_worker_must_have_the_same_groups(make_cluster: Any) -> None:
    async with make_cluster(SEVERAL) as cluster:
        cluster.worker.model = ONE
        await cluster.worker_server.stop(None)
        server, _ = await start(cluster.worker, f"127.0.0.1:{cluster.worker_port}")
        try:
            await cluster.until(lambda: "kv_groups differ" in cluster.engine.groups[0].reason)
        finally:
            await server.stop(None)


# --- what a worker says --------------------------------------------------------------------------


def groups_of(model: FakeModel) -> tuple[KvGroup, ...]:
    return core_config(CONFIG, describe(model, 1)).kv_groups


def test_the_groups_of_a_core_are_those_that_its_worker_tells() -> None:
    assert groups_of(ONE) == groups_of(replace(ONE, kv_groups=(KvGroup(16),))) == ()
    assert groups_of(SEVERAL) == GROUPS
    assert groups_of(replace(ONE, protocol_minor=0)) == (), "a worker before groups"


def test_groups_that_this_scheduler_does_not_understand_are_refused_by_name() -> None:
    worker = describe(SEVERAL, 1)
    for change, problem in (
        ({"kind": 7}, r"kv_groups\[1\]: its kind is 7, which is unknown here"),
        ({"block_size": 0}, "kv_groups: block_size is 0"),
        ({"window": 1}, "kv_groups: window is 1"),
    ):
        wrong = worker_pb2.WorkerDescription.FromString(worker.SerializeToString())
        wrong.kv_groups[1].MergeFrom(worker_pb2.KvGroup(**change))  # type: ignore[arg-type]
        if "block_size" in change:
            wrong.kv_groups[1].block_size = 0
        with pytest.raises(WrongWorker, match=problem):
            core_config(CONFIG, wrong)
    worker.block_size = 8
    with pytest.raises(WrongWorker, match=r"kv_groups\[0\]: its block_size is 16, the worker's 8"):
        core_config(CONFIG, worker)
    with pytest.raises(WrongWorker, match="it has kv_groups, and protocol_minor 2"):
        core_config(CONFIG, describe(replace(SEVERAL, protocol_minor=2), 1))


@pytest.mark.parametrize("before", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("after", [ONE, SEVERAL], ids=["one", "several"])
def test_a_core_goes_on_and_shares_requests_with_equal_groups_alone(
    before: FakeModel, after: FakeModel
) -> None:
    config, worker, served = core_config(CONFIG, describe(before, 1)), describe(after, 2), Served()
    served.claim("a:1", describe(before, 1))
    if before == after:
        check_successor(config, worker)
        served.claim("b:1", worker)
        return
    with pytest.raises(WrongWorker, match="its kv_groups differ"):
        check_successor(config, worker)
    with pytest.raises(WrongWorker, match="its kv_groups is 16 tokens"):
        served.claim("b:1", worker)


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", range(STEP_MINOR + 2))
def test_a_scheduler_below_3_is_refused_by_a_worker_that_needs_groups(minor: int) -> None:
    is_refused = minor < MINOR_WITH_KV_GROUPS
    assert kv_groups_problem(minor, []) is kv_groups_problem(minor, [0]) is None
    for windows in ([0, 0], [40], [0, 40]):
        problem = kv_groups_problem(minor, windows)
        assert (problem is not None) == is_refused
        assert problem is None or f"protocol_minor {minor} knows no kv_groups" in problem


@pytest.mark.parametrize(
    ("model", "minor", "is_served"),
    [(ONE, 2, True), (SEVERAL, 2, False), (SEVERAL, 3, True)],
    ids=["old scheduler, one group", "old scheduler, groups", "both know groups"],
)
async def test_an_old_scheduler_is_served_or_refused_in_the_handshake(
    model: FakeModel, minor: int, is_served: bool
) -> None:
    server, port = await start(FakeWorker(model), "127.0.0.1:0")
    hello = worker_pb2.Hello(
        protocol_version=STEP_MAJOR, epoch=1, first_step_id=1, protocol_minor=minor
    )
    async with (
        asyncio.timeout(patience(20)),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
        await stream.write(worker_pb2.AttachRequest(hello=hello))
        if is_served:
            assert (await stream.read()).HasField("description")
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="knows no kv_groups") as raised:
                await stream.read()
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        stream.cancel()
    await server.stop(None)


async def test_an_old_worker_without_groups_is_served(make_cluster: Any) -> None:
    async with make_cluster(replace(ONE, protocol_minor=2)) as cluster:
        tokens, _ = await run(cluster, request("a", 1))
    assert tokens == expected(1)


async def test_an_old_worker_that_tells_groups_is_refused(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        cluster.worker.model = replace(SEVERAL, protocol_minor=2)
        await cluster.worker_server.stop(None)
        server, _ = await start(cluster.worker, f"127.0.0.1:{cluster.worker_port}")
        try:
            await cluster.until(lambda: "protocol_minor 2" in cluster.engine.groups[0].reason)
        finally:
            await server.stop(None)
