"""A load from several client processes at once, so that the client is not what is measured.

Times of all processes are of one clock (CLOCK_MONOTONIC), and so can be compared.
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier

from bench.serving import session
from pagewire._aio import AsyncClient
from pagewire._types import Prompt
from pagewire.cli.benchmark.load import Ask, LoadSettings, Sample, ask_gateway, run_load
from pagewire.cli.benchmark.openai_http import OpenAIServer

VOCABULARY = 10_000  # prompt tokens are below
READY_TIMEOUT_S = 120.0
APIS = ("http", "grpc", "scheduler")

_begin: Barrier | None = None


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests of one length, at a rate per second, or so many in flight."""

    name: str
    num_requests: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    num_clients: int = 1
    seed: int = 0

    def share(self, index: int) -> "OfferedLoad":
        """The load of one of the clients; independent Poisson processes add up to one."""
        first, end = (self.num_requests * i // self.num_clients for i in (index, index + 1))
        return replace(
            self,
            num_requests=end - first,
            rate_per_s=self.rate_per_s and self.rate_per_s / self.num_clients,
            concurrency=self.concurrency and -(-self.concurrency // self.num_clients),
            seed=self.seed * 1000 + index,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The server to ask, and how."""

    api: str  # one of APIS
    address: str  # HOST:PORT


def run(target: Target, load: OfferedLoad) -> list[Sample]:
    """Sends the load and returns every request's sample; all clients begin together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(load.num_clients)
    with ProcessPoolExecutor(
        load.num_clients, mp_context=context, initializer=_keep, initargs=(barrier,)
    ) as pool:
        shares = [load.share(index) for index in range(load.num_clients)]
        sent = [pool.submit(_send, target, share) for share in shares]
        return [sample for one in sent for sample in one.result()]


def _keep(barrier: Barrier) -> None:
    global _begin
    _begin = barrier


def _send(target: Target, load: OfferedLoad) -> list[Sample]:
    return asyncio.run(_drive(target, load))


async def _drive(target: Target, load: OfferedLoad) -> list[Sample]:
    generator = random.Random(load.seed)
    prompts: list[Prompt] = [
        [generator.randrange(VOCABULARY) for _ in range(load.input_len)]
        for _ in range(load.num_requests)
    ]
    async with _connected(target) as (ask, model):
        settings = LoadSettings(
            load.concurrency, load.output_len, model, load.rate_per_s, load.seed
        )
        await run_load(ask, [[1, 2, 3]], replace(settings, rate_per_s=None), lambda: None)
        if _begin is not None:
            await asyncio.to_thread(_begin.wait, READY_TIMEOUT_S)
        return await run_load(ask, prompts, settings, lambda: None)


@contextlib.asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[tuple[Ask, str]]:
    """The function that asks, and the model's name where a request must name it."""
    if target.api == "http":
        server = OpenAIServer(f"http://{target.address}")
        yield server.stream, (await server.models())[0]["id"]
    elif target.api == "grpc":
        async with AsyncClient(target.address) as client:
            await client.wait_until_ready(timeout_s=READY_TIMEOUT_S)
            yield ask_gateway(client), ""
    else:
        async with session.connected(target.address, f"bench-{os.getpid()}") as ask:
            yield ask, ""
