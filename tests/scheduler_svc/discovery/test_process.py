"""`python -m scheduler_svc` finds workers by name: health, options, and TLS by the name."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.cli.launcher.certificates import make_certificates
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2_grpc
from scheduler_svc.config import parse
from scheduler_svc.worker.link import LinkLost, WorkerClient, open_channel
from simulator.workers.fake_worker import FakeWorker, start
from tests.pace import patience
from tests.ports import free_port
from wire.identity.certificates import certificates_of
from wire.identity.options import IdentityOptions
from wire.identity.peers import peer_opener

ROOT = Path(__file__).parents[3]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def scheduler(*options: str) -> AsyncIterator[grpc.aio.Channel]:
    """A scheduler process; asserts that SIGTERM ends it with status 0."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler_svc", "--port", str(port), *options], cwd=ROOT
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), patience(20))
            yield channel
        process.terminate()
        assert await asyncio.to_thread(process.wait, patience(20)) == 0
    finally:
        process.kill()
        process.wait()


async def health(channel: grpc.aio.Channel, wanted: int) -> None:
    async with asyncio.timeout(patience(15)):
        while True:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            if answer.status == wanted:
                return
            await asyncio.sleep(0.05)


async def test_a_worker_found_by_its_name_makes_the_scheduler_serve() -> None:
    worker_port = free_port()
    options = ("--worker-dns", f"localhost:{worker_port}", "--worker-dns-period-s", "0.1")
    async with scheduler(*options) as channel:
        await health(channel, NOT_SERVING)
        server, _ = await start(FakeWorker(), f"127.0.0.1:{worker_port}")
        await health(channel, SERVING)
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        status = await stub.GetStatus(scheduler_pb2.GetStatusRequest())
        named = next(group for group in status.groups if group.ready)
        assert named.address == f"127.0.0.1:{worker_port}"
        assert named.source == f"--worker-dns localhost:{worker_port}"
        await server.stop(None)
        await health(channel, NOT_SERVING)


async def test_a_name_that_does_not_exist_keeps_the_scheduler_waiting() -> None:
    async with scheduler("--worker-dns", "workers.invalid:50053") as channel:
        await health(channel, NOT_SERVING)
        status = await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetStatus(
            scheduler_pb2.GetStatusRequest()
        )
        assert status.reason == "no worker is known yet" and not status.groups


@pytest.mark.parametrize("name", ["workers", "workers:", "workers:http", ":50053", "workers:0"])
def test_a_name_without_a_port_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--worker-dns", name])
    assert f"worker_dns: {name!r} is not HOST:PORT" in capsys.readouterr().err


def test_a_name_may_stand_beside_addresses_or_alone() -> None:
    assert parse([]).workers == ("127.0.0.1:50053",)
    assert parse(["--worker-dns", "w:1"]).workers == ()
    assert parse(["--accept-registrations"]).workers == ()
    both = parse(["--worker-dns", "w:1", "--worker", "a:2", "--worker-dns", "v:1"])
    assert (both.workers, both.worker_dns) == (("a:2",), ("w:1", "v:1"))
    with pytest.raises(SystemExit):
        parse(["--worker-dns", "w:1", "--worker-dns", "w:1"])


async def test_over_tls_the_certificate_of_an_address_is_that_of_the_name(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, ("workers.example",))
    identity = IdentityOptions(tls_cert=made.cert, tls_key=made.key, tls_ca=made.ca)
    certificates = certificates_of(identity)
    assert certificates is not None
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorker(), server)
    # An address that the certificate does not name, as that of a pod.
    port = server.add_secure_port("127.0.0.5:0", certificates.grpc_credentials())
    await server.start()

    async def epoch(server_name: str) -> int:
        opened = partial(open_channel, opener=peer_opener(identity), server_name=server_name)
        client = WorkerClient(f"127.0.0.5:{port}", patience(3), opened)
        try:
            return await client.epoch()
        finally:
            await client.close()

    assert await epoch("workers.example") == 0
    for wrong in ("", "other.example"):
        with pytest.raises(LinkLost):
            await epoch(wrong)
    await server.stop(None)
