"""A scheduler in this process, on the real wire, with a fake worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import pytest

from pagewire.v1 import debug_pb2_grpc, live_pb2_grpc, scheduler_pb2_grpc
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import Scheduler
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.debug import DebugService
from scheduler_svc.engine import Engine
from scheduler_svc.live.service import LiveService
from scheduler_svc.service import SchedulerService, add_to_server
from scheduler_svc.worker.link import FencedOut
from simulator.workers.fake_worker import FakeModel, FakeWorker, start
from tests.pace import paced, patience
from wire.requests.check import RequestCheck
from wire.server import SERVER_OPTIONS, PortInUse, bind

T = TypeVar("T")


@dataclass(slots=True)
class Cluster:
    """One scheduler and its fake worker."""

    worker: FakeWorker
    worker_server: grpc.aio.Server
    worker_port: int
    scheduler_port: int
    engine: Engine
    scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"  # a name that only the stubs define
    debug: "debug_pb2_grpc.DebugServiceAsyncStub"
    channel: grpc.aio.Channel
    running: asyncio.Task[None]  # the engine's

    @property
    def core(self) -> Scheduler:
        """The core of the one worker group."""
        core = self.engine.groups[0].core
        assert core is not None
        return core

    async def until(self, holds: object, timeout_s: float = patience(5.0)) -> None:
        """Waits until a callable returns true."""
        assert callable(holds)
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.005)


def service_config(worker_port: int, **options: object) -> ServiceConfig:
    defaults: dict[str, object] = {
        "workers": (f"127.0.0.1:{worker_port}",),
        "host": "127.0.0.1",
        "port": 0,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
        "lookahead": 1,
        "step_timeout_s": paced(5.0),
        "heartbeat_timeout_s": paced(3.0),
    }
    return ServiceConfig(**{**defaults, **options})  # type: ignore[arg-type]


async def start_again(worker: FakeWorker, port: int) -> grpc.aio.Server:
    """Restarts a worker on its first port, which another connection may hold for a moment."""
    async with asyncio.timeout(patience(10)):
        while True:
            try:
                server, _ = await start(worker, f"127.0.0.1:{port}")
                return server
            except PortInUse:
                await asyncio.sleep(0.05)


async def obey(ask: Callable[[], Awaitable[T]], most: int = 3) -> tuple[T, int]:
    """Calls `ask` again after each refusal for overload; returns (answer, number of refusals)."""
    for num_refused in range(most + 1):
        try:
            return await ask(), num_refused
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(pushback_s(error))
    raise AssertionError(f"refused for overload {most + 1} times although it came when told to")


def pushback_s(error: grpc.aio.AioRpcError) -> float:
    """The time after which a refused call should retry, in seconds."""
    return float(dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]) / 1e3


@asynccontextmanager
async def cluster(
    model: FakeModel | None = None, step_time: StepTime | None = None, **options: object
) -> AsyncIterator[Cluster]:
    """Starts both and waits until the scheduler is ready."""
    async with AsyncExitStack() as stack, asyncio.timeout(patience(30)):
        worker = FakeWorker(model, step_time)
        worker_server, worker_port = await start(worker, "127.0.0.1:0")
        stack.push_async_callback(worker_server.stop, None)
        engine = Engine(service_config(worker_port, **options))
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RequestCheck()])
        add_to_server(SchedulerService(engine), server)
        debug_pb2_grpc.add_DebugServiceServicer_to_server(DebugService(engine), server)
        live_pb2_grpc.add_LiveServiceServicer_to_server(LiveService(engine), server)
        port = bind(server, "127.0.0.1:0", "test")
        await server.start()
        stack.push_async_callback(server.stop, None)
        running = asyncio.create_task(engine.run())

        async def stop_engine() -> None:
            running.cancel()
            (outcome,) = await asyncio.gather(running, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError | FencedOut):
                raise AssertionError("the engine failed") from outcome

        stack.push_async_callback(stop_engine)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        made = Cluster(
            worker,
            worker_server,
            worker_port,
            port,
            engine,
            scheduler_pb2_grpc.SchedulerServiceStub(channel),
            debug_pb2_grpc.DebugServiceStub(channel),
            channel,
            running,
        )
        await made.until(lambda: engine.is_ready)
        yield made


@pytest.fixture
def make_cluster() -> object:
    """The context manager above, for tests that need their own options."""
    return cluster
