"""GET /metrics of a gateway: who may read it, and sums over several processes, dead ones too."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagewire.v1 import types_pb2
from tests.gateway.test_process import children_of, spawn, wait_until_ready
from tests.pace import patience
from tests.ports import free_port
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETION = {"prompt": "Hello"}
ENDED = "pagewire_gateway_requests_total"


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a name's series that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_with_keys_metrics_are_for_operators(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    made = {role: new_key(role.value, "acme", [role]) for role in (Role.USER, Role.OPERATOR)}
    file = tmp_path / "keys"
    file.write_text("\n".join(entry.line() for _, entry in made.values()))
    http = (await start(identity=IdentityOptions(api_keys=file), wait=False)).http
    assert (await http.get("/metrics")).status_code == 401
    for role, status in ((Role.USER, 403), (Role.OPERATOR, 200)):
        headers = {"authorization": f"Bearer {made[role][0]}"}
        assert (await http.get("/metrics", headers=headers)).status_code == status


async def test_the_metrics_port_serves_what_the_route_does(start: Callable[..., Any]) -> None:
    port = free_port()
    running = await start(identity=IdentityOptions(metrics_port=port))
    async with httpx.AsyncClient(timeout=patience(10)) as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    assert total(text, "pagewire_gateway_ready") == 1
    assert total(text, "vllm:num_requests_running", model_name="tiny") == 0
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    route = (await running.http.get("/metrics")).text
    assert names <= {line.split("{")[0].split(" ")[0] for line in route.splitlines()}


async def test_failures_are_outcomes_by_their_code(running: Any) -> None:
    running.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    before = (await running.http.get("/metrics")).text
    assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 429
    after = (await running.http.get("/metrics")).text
    assert total(after, ENDED, outcome="overloaded") == 1 + total(
        before, ENDED, outcome="overloaded"
    )
    assert total(after, ENDED) == 1 + total(before, ENDED)


async def test_an_abort_and_an_end_are_told_apart(running: Any) -> None:
    before = (await running.http.get("/metrics")).text
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    answer = (await running.http.post("/v1/completions", json=COMPLETION)).json()
    after = (await running.http.get("/metrics")).text
    assert answer["choices"][0]["finish_reason"] == "length"
    grown = {
        name: total(after, f"pagewire_gateway_{name}") - total(before, f"pagewire_gateway_{name}")
        for name in ("prompt_tokens_total", "output_tokens_total", "requests_total")
    }
    usage = answer["usage"]
    assert list(grown.values()) == [usage["prompt_tokens"], usage["completion_tokens"], 1]


async def test_sums_over_processes_survive_the_death_of_one(
    model_folder: Path, scheduler_server: Any
) -> None:
    _, address = scheduler_server
    port = free_port()
    where = ("--http-port", str(port), "--grpc-port", str(free_port()), "--processes", "2")
    process = await spawn("--model", str(model_folder), "--scheduler", address, *where)
    url, num_sent = f"http://127.0.0.1:{port}", 0

    async def scraped() -> str:
        # A connection of its own each time: any of the processes may answer.
        async with httpx.AsyncClient(timeout=patience(10)) as http:
            return (await http.get(f"{url}/metrics")).text

    async def send(count: int) -> None:
        nonlocal num_sent
        for _ in range(count):
            async with httpx.AsyncClient(timeout=patience(10)) as http:
                answer = await http.post(f"{url}/v1/completions", json=COMPLETION)
                assert answer.status_code in (200, 503)  # a successor may not be ready yet
                num_sent += answer.status_code == 200

    try:
        async with asyncio.timeout(patience(40)):
            async with httpx.AsyncClient(base_url=url, timeout=patience(10)) as http:
                await wait_until_ready(http)
            while total(await scraped(), "process_open_fds", process="1") == 0:
                await asyncio.sleep(0.05)
            await send(24)
            for _ in range(8):
                assert total(await scraped(), ENDED, outcome="stop") == num_sent
            victim = children_of(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            while victim in children_of(process.pid):
                await asyncio.sleep(0.02)
            assert total(await scraped(), ENDED, outcome="stop") == num_sent
            while len(children_of(process.pid)) < 2:
                await asyncio.sleep(0.02)
            await send(12)
            for _ in range(8):
                assert total(await scraped(), ENDED, outcome="stop") == num_sent
        process.terminate()
        await asyncio.wait_for(process.wait(), patience(20))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
