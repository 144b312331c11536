"""A scheduler that finds simulated workers by name, by registration and through operators.

All workers listen on one port, each on a loopback address of its own, as pods of a service do. The
test says what the name's lookup answers.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from pagewire.v1 import fleet_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.discovery.fleet import Fleet
from scheduler_svc.discovery.service import FleetService
from scheduler_svc.engine import Engine
from scheduler_svc.group import WorkerGroup
from scheduler_svc.service import SchedulerService
from simulator.workers.fake_worker import FakeModel, FakeWorker, start
from simulator.workers.slots import token_at
from tests.pace import patience
from tests.ports import free_port
from tests.scheduler_svc.conftest import service_config
from wire.requests.check import RequestCheck
from wire.server import SERVER_OPTIONS, bind

STEPS = StepTime(base_s=0.004)
NUM_TOKENS = 100
NUM_PROMPT = 20
PERIOD_S = 0.02


class Answers:
    """Answers of lookups of the name: addresses, an error, or nothing for a while."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.error: OSError | None = None
        self.num_lookups = 0
        self.num_running = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, name: str, port: int) -> frozenset[str]:
        self.num_running += 1
        self.may_answer.wait()
        self.num_running -= 1
        self.num_lookups += 1
        if self.error is not None:
            raise self.error
        return frozenset(f"{host}:{port}" for host in self.hosts)


@dataclass(slots=True)
class Stage:
    """The scheduler, and the workers by host."""

    port: int
    answers: Answers
    engine: Engine
    fleet: Fleet
    scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"
    registry: "fleet_pb2_grpc.FleetServiceAsyncStub"
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    servers: dict[str, grpc.aio.Server] = field(default_factory=dict)

    def address(self, host: str) -> str:
        return f"{host}:{self.port}"

    def group(self, host: str) -> WorkerGroup:
        return next(g for g in self.engine.groups if g.address == self.address(host))

    @property
    def hosts(self) -> set[str]:
        """The hosts of all groups there are."""
        return {group.address.rpartition(":")[0] for group in self.engine.groups}

    @property
    def open_hosts(self) -> set[str]:
        """The hosts that take requests."""
        groups = [group for group in self.engine.groups if group.is_open]
        return {group.address.rpartition(":")[0] for group in groups}

    async def start_worker(self, host: str, model: FakeModel | None = None) -> FakeWorker:
        """Starts a new process at this host, in place of the one before."""
        await self.stop_worker(host)
        self.workers[host] = worker = FakeWorker(model, STEPS)
        self.servers[host], _ = await start(worker, self.address(host))
        return worker

    async def stop_worker(self, host: str) -> None:
        if host in self.servers:
            await self.servers.pop(host).stop(None)
            del self.workers[host]

    async def until(self, holds: Callable[[], object], timeout_s: float = patience(10.0)) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.005)

    async def looked_up(self, times: int = 3) -> None:
        """Waits until the name has been looked up so many times more, and has been followed."""
        wanted = self.answers.num_lookups + times + 1
        await self.until(lambda: self.answers.num_lookups >= wanted)

    async def status(self) -> scheduler_pb2.GetStatusResponse:
        answer: scheduler_pb2.GetStatusResponse = await self.scheduler.GetStatus(
            scheduler_pb2.GetStatusRequest()
        )
        return answer

    # --- requests --------------------------------------------------------------------------------

    def ask(self, seed: int, num_tokens: int = NUM_TOKENS) -> "asyncio.Task[list[int]]":
        """Starts a request with a prompt of its own."""
        return asyncio.create_task(self._run(seed, num_tokens))

    async def _run(self, seed: int, num_tokens: int) -> list[int]:
        sampling = types_pb2.SamplingParams(max_tokens=num_tokens, seed=seed)
        asked = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id=f"r{seed}",
            prompt_token_ids=[1000 + seed, *range(2, NUM_PROMPT + 1)],
            sampling=sampling,
        )
        return [t async for answer in self.scheduler.Generate(asked) for t in answer.token_ids]

    async def finish(self, calls: "list[asyncio.Task[list[int]]]", first_seed: int = 0) -> None:
        """Asserts that each request, seeds counted from `first_seed`, got its undisturbed text."""
        answers = await asyncio.gather(*calls)
        for seed, tokens in enumerate(answers, first_seed):
            assert tokens == undisturbed(seed, len(tokens)), f"request {seed} differs"
            assert len(tokens) == NUM_TOKENS, f"request {seed} lost tokens"


def undisturbed(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    positions = np.arange(NUM_PROMPT, NUM_PROMPT + num_tokens)
    return token_at(np.full(num_tokens, seed, dtype=np.uint64), positions, 32000).tolist()


@asynccontextmanager
async def staged(*hosts: str, is_named: bool = True, **options: Any) -> AsyncIterator[Stage]:
    """The scheduler, with a worker at each host, which the name has unless told otherwise."""
    port, answers = free_port(), Answers()
    settings: dict[str, Any] = {
        "workers": (),
        "worker_dns": (f"workers.example:{port}",),
        "worker_dns_period_s": PERIOD_S,
        "accept_registrations": True,
    }
    engine = Engine(service_config(port, **(settings | options)))
    fleet = Fleet(engine, answers)
    async with AsyncExitStack() as stack, asyncio.timeout(patience(60)):
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RequestCheck()])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(fleet), server)
        own_port = bind(server, "127.0.0.1:0", "test")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(f"127.0.0.1:{own_port}")
        )
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        stage = Stage(port, answers, engine, fleet, stub, fleet_pb2_grpc.FleetServiceStub(channel))
        stack.push_async_callback(_stop_workers, stage)
        for host in hosts:
            await stage.start_worker(host)
        answers.hosts = set(hosts) if is_named else set()
        tasks = [asyncio.create_task(engine.run()), asyncio.create_task(fleet.run())]
        stack.push_async_callback(_stop, tasks)
        stack.callback(answers.may_answer.set)
        await stage.until(lambda: not is_named or stage.open_hosts == set(hosts))
        yield stage


async def _stop_workers(stage: Stage) -> None:
    for host in list(stage.servers):
        await stage.stop_worker(host)


async def _stop(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [o for o in outcomes if not isinstance(o, asyncio.CancelledError)]
    assert not failed, failed
