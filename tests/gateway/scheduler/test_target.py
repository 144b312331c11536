"""The target of the gateway's channel: one scheduler, or the active one of several."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.process.config import GatewayConfig
from gateway.scheduler.target import scheduler_target
from tests.pace import patience
from wire.health_port import ACTIVE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_addresses_become_targets_of_grpc() -> None:
    def name(addresses: str, dns: str = "") -> str:
        return scheduler_target(addresses, dns, uses_tls=False).name

    assert name("scheduler:50052") == "scheduler:50052"
    assert name("10.0.0.1:1,10.0.0.2:2") == "ipv4:10.0.0.1:1,10.0.0.2:2"
    assert name("[::1]:1,[::2]:1") == "ipv6:[::1]:1,[::2]:1"
    assert name("", "schedulers.llm:50052") == "dns:///schedulers.llm:50052"


def test_one_address_alone_is_used_whatever_its_health() -> None:
    assert scheduler_target("scheduler:50052", "", uses_tls=True).options == []


@pytest.mark.parametrize(
    ("addresses", "dns", "uses_tls", "problem"),
    [
        ("", "", False, "give one of --scheduler and --scheduler-dns"),
        ("a:1", "b:1", False, "give one of --scheduler and --scheduler-dns"),
        ("a", "", False, "--scheduler: 'a' is not HOST:PORT"),
        ("a:0", "", False, "--scheduler: 'a:0' is not HOST:PORT"),
        ("", "b", False, "--scheduler-dns: 'b' is not NAME:PORT"),
        ("10.0.0.1:1,", "", False, "--scheduler: '' is not HOST:PORT"),
        ("10.0.0.1:1,10.0.0.1:1", "", False, "name each once"),
        ("a:1,b:1", "", False, "'a' is no IP address"),
        ("10.0.0.1:1,[::1]:1", "", False, "must all be IPv4 or all IPv6"),
        ("10.0.0.1:1,10.0.0.2:1", "", True, "with TLS several have one name"),
    ],
)
def test_what_cannot_be_a_target_is_refused(
    addresses: str, dns: str, uses_tls: bool, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem.replace("[", r"\[")):
        scheduler_target(addresses, dns, uses_tls=uses_tls)


def test_a_gateway_is_not_configured_with_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="--scheduler: 'nowhere' is not HOST:PORT"):
        GatewayConfig(tmp_path, "nowhere")


async def test_calls_go_to_the_active_one_and_change_sides_with_it() -> None:
    ports, healths, servers = [], [], []
    for number in range(2):
        server, servicer = grpc.aio.server(), health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        healths.append(servicer)
        servers.append(server)
        await server.start()
        await servicer.set(f"number {number}", SERVING)
    target = scheduler_target(",".join(f"127.0.0.1:{p}" for p in ports), "", uses_tls=False)
    async with grpc.aio.insecure_channel(target.name, options=target.options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def until_it_is(number: int) -> None:
            async with asyncio.timeout(patience(20)):
                while True:
                    try:
                        await stub.Check(health_pb2.HealthCheckRequest(service=f"number {number}"))
                    except grpc.aio.AioRpcError as error:
                        # There is none, or it is the other one, which does not know that name.
                        either = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
                        assert error.code() in either, error
                    else:
                        return
                    await asyncio.sleep(0.02)

        for active in (0, 1, 0):
            for number, servicer in enumerate(healths):
                await servicer.set(ACTIVE, SERVING if number == active else NOT_SERVING)
            await until_it_is(active)
    for server in servers:
        await server.stop(None)
