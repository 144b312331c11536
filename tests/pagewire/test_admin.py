"""Calls of an operator, to a scheduler that notes them."""

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import pagewire
from pagewire.admin import Admin, AsyncAdmin, LiveRequestSummary
from pagewire.v1 import debug_pb2, debug_pb2_grpc, scheduler_pb2_grpc
from pagewire.v1 import scheduler_pb2 as pb
from tests.pace import patience

LIVE = ("nightly-7", "tenant/other")


class Operated(scheduler_pb2_grpc.SchedulerServiceServicer, debug_pb2_grpc.DebugServiceServicer):
    """A scheduler with two live requests."""

    def __init__(self) -> None:
        self.target = ""
        self.priorities: dict[str, int] = {}
        self.keys: list[str | None] = []

    def GetStatus(self, request, context):
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        group = pb.WorkerGroupStatus(address="w:1", ready=True, num_running=3, num_losses=2)
        status = pb.GetStatusResponse(
            ready=True, policy="priority", num_running=3, num_free_blocks=7, groups=[group]
        )
        status.model.model = "tiny"
        return status

    def ListRequests(self, request, context):
        summaries = [
            debug_pb2.RequestSummary(request_id=name, state="running", num_output_tokens=4)
            for name in LIVE[: request.limit]
        ]
        return debug_pb2.ListRequestsResponse(requests=summaries, total=len(LIVE))

    def Abort(self, request, context):
        return pb.AbortResponse(aborted=[name for name in request.request_ids if name in LIVE])

    def SetPriority(self, request, context):
        if request.request_id not in LIVE:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{request.request_id} is not live")
        self.priorities[request.request_id] = request.priority
        return pb.SetPriorityResponse()

    def ResetPrefixCache(self, request, context):
        return pb.ResetPrefixCacheResponse(num_blocks=11)


@pytest.fixture
def operated(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[Operated]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    monkeypatch.delenv("PAGEWIRE_API_KEY", raising=False)
    scheduler = Operated()
    server = grpc.server(ThreadPoolExecutor(4))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    debug_pb2_grpc.add_DebugServiceServicer_to_server(scheduler, server)
    scheduler.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield scheduler
    server.stop(0).wait(patience(5))


def test_an_operator_sees_and_changes_what_is_live(operated: Operated) -> None:
    with Admin(operated.target) as admin:
        status = admin.status()
        assert (status.is_ready, status.model, status.policy) == (True, "tiny", "priority")
        assert (status.num_running, status.num_free_blocks) == (3, 7)
        assert status.seconds_of_backlog is None
        assert [(one.address, one.num_losses) for one in status.groups] == [("w:1", 2)]
        assert admin.requests(1) == (LiveRequestSummary("nightly-7", "running", 0, 4, 0.0),)
        assert admin.abort("nightly-7", "gone", "tenant/other") == LIVE
        admin.set_priority("nightly-7", -3)
        assert operated.priorities == {"nightly-7": -3}
        assert admin.reset_prefix_cache() == 11
        with pytest.raises(pagewire.NotFound, match="gone is not live"):
            admin.set_priority("gone", 1)
        with pytest.raises(pagewire.InvalidArgument, match="priority"):
            admin.set_priority("nightly-7", 1 << 40)


async def test_and_so_does_one_with_asyncio(operated: Operated) -> None:
    async with AsyncAdmin(operated.target) as admin:
        assert (await admin.status()).groups[0].is_ready
        assert len(await admin.requests()) == 2
        assert await admin.abort("nightly-7") == ("nightly-7",)
        await admin.set_priority("nightly-7", 5)
        assert operated.priorities == {"nightly-7": 5}
        assert await admin.reset_prefix_cache() == 11


def test_both_have_the_same_methods_with_the_same_parameters() -> None:
    def surface(client: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_")
        }

    assert surface(Admin) == surface(AsyncAdmin)


def test_the_key_is_given_or_found_with_the_scheduler_or_in_the_environment(
    operated: Operated, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("PAGEWIRE_SCHEDULER", operated.target)
    Admin().status()
    monkeypatch.setenv("PAGEWIRE_API_KEY", "from-environment")
    Admin().status()
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / f"{operated.target.rpartition(':')[2]}.token").write_text("found\n")
    Admin().status()
    Admin(api_key="given").status()
    assert operated.keys == [None, "Bearer from-environment", "Bearer found", "Bearer given"]


def test_a_key_of_the_environment_is_not_sent_in_clear_to_another_machine(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    assert Admin("scheduler.example:50052")._connection.api_key is None
    with pytest.raises(ValueError, match="unencrypted"):
        Admin("scheduler.example:50052", api_key="secret")
