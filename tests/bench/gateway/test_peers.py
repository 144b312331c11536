"""The scripted scheduler of bench.gateway, and what it reads of the gateway's processes."""

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest

from bench.gateway.__main__ import GatewayProcess
from bench.gateway.peers import TokenSource
from pagewire.v1 import scheduler_pb2 as pb
from pagewire.v1 import scheduler_pb2_grpc, types_pb2
from tests.pace import patience
from wire import columns


async def read_session(stub: Any, handles: list[int], num_rounds: int) -> list[list[int]]:
    """Submits the handles, reads to their end, again and again; the handles of each message."""
    seen: list[list[int]] = []
    requests: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    async def sent() -> Any:
        while True:
            yield await requests.get()

    call = stub.Session(sent())
    for _ in range(num_rounds):
        for handle in handles:
            requests.put_nowait(pb.SessionRequest(submit=pb.Submit(handle=handle)))
        num_ended = 0
        while num_ended < len(handles):
            message = await call.read()
            seen.append(columns.unpack(message.handles, columns.UINT32).tolist())
            num_ended += len(message.finished)
    call.cancel()
    return seen


@pytest.mark.asyncio
async def test_the_sessions_of_several_gateways_begin_and_step_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = TokenSource(types_pb2.ModelInfo(), [7, 8, 9], 5, 0.0)  # type: ignore[abstract]
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        async with asyncio.timeout(patience(20)):
            one, other = await asyncio.gather(
                read_session(stub, [1, 2, 3], 2), read_session(stub, [1, 2], 2)
            )
    assert one == 2 * [[1, 2, 3], [1, 2, 3], [1, 2, 3], []]
    assert other == 2 * [[1, 2], [1, 2], [1, 2], []]
    assert capsys.readouterr().out.count("sent_s") == 2
    await server.stop(0)


def test_the_children_of_a_supervisor_are_counted() -> None:
    child = "import sys; print(1, flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(GatewayProcess(process)._pids()) == 2
        assert GatewayProcess(process).memory_kib() > 2 * 2_000
        process.communicate()
