"""Two schedulers in this process, on the real wire, with fake workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler_svc.config import parse
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from scheduler_svc.session import STANDS_BY
from scheduler_svc.standby.watch import Standby
from scheduler_svc.status import status_of
from scheduler_svc.worker.link import FencedOut
from simulator.workers.fake_worker import FakeWorker, start
from tests.pace import paced, patience
from tests.scheduler_svc.conftest import service_config
from wire.server import SERVER_OPTIONS, bind

DELAY_S = 1.2  # a pause of this process that is longer than that lets the standby take over


@dataclass(slots=True)
class One:
    """A scheduler of several: what `python -m scheduler_svc` runs, without its ports."""

    engine: Engine
    running: "asyncio.Task[None] | None" = None
    alive: "asyncio.Task[None] | None" = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def start(self) -> None:
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        standby = Standby(self.engine, paced(DELAY_S))
        await standby.wait_for_turn()
        self.alive = asyncio.create_task(standby.say_alive())
        try:
            await self.engine.run()
        finally:
            self.alive.cancel()

    async def stop(self) -> BaseException | None:
        """Ends it as its process's death would; what it raised before, if anything."""
        assert self.running is not None
        self.running.cancel()
        (outcome,) = await asyncio.gather(self.running, return_exceptions=True)
        return outcome if not isinstance(outcome, asyncio.CancelledError) else None


@dataclass(slots=True)
class Stage:
    """Workers, and schedulers for them."""

    workers: list[FakeWorker]
    ports: list[int]
    made: list[One] = field(default_factory=list)

    def scheduler(self) -> One:
        addresses = tuple(f"127.0.0.1:{port}" for port in self.ports)
        options = {"workers": addresses, "standby_delay_s": paced(DELAY_S)}
        self.made.append(One(Engine(service_config(self.ports[0], **options))))
        self.made[-1].start()
        return self.made[-1]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(30)):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stage(num_workers: int = 2) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        made = Stage([], [])
        for _ in range(num_workers):
            worker = FakeWorker()
            server, port = await start(worker, "127.0.0.1:0")
            stack.push_async_callback(server.stop, None)
            made.workers.append(worker)
            made.ports.append(port)
        try:
            yield made
        finally:
            for one in made.made:
                await one.stop()


async def lose(one: One, why: str) -> None:
    """Breaks the stream to the only worker."""
    group = one.engine.groups[0]
    await until(lambda: group.is_attached)
    link = group._link
    assert link is not None
    link.lose(why)


def are_all_ready(one: One) -> bool:
    return all(group.is_ready for group in one.engine.groups)


async def test_the_second_scheduler_stands_by_and_takes_over_when_the_first_is_gone() -> None:
    async with stage() as made:
        first = made.scheduler()
        assert status_of(first.engine).stands_by
        await until(lambda: are_all_ready(first))
        assert not status_of(first.engine).stands_by
        second = made.scheduler()
        await until(lambda: second.engine.is_warm)
        await asyncio.sleep(paced(3 * DELAY_S))
        status = status_of(second.engine)
        assert status.stands_by and not status.ready
        assert "another scheduler has worker" in status.reason
        epochs = [worker.epoch for worker in made.workers]
        assert await first.stop() is None
        await until(lambda: are_all_ready(second))
        assert all(w.epoch > epoch for w, epoch in zip(made.workers, epochs, strict=True))
        assert min(w.epoch for w in made.workers) >= second.engine.term > first.engine.term


async def test_a_lost_stream_alone_does_not_take_the_worker_away() -> None:
    async with stage(1) as made:
        first = made.scheduler()
        await until(lambda: are_all_ready(first))
        second = made.scheduler()
        await until(lambda: second.engine.is_warm)
        group = first.engine.groups[0]
        for epoch in range(group.epoch, group.epoch + 3):
            await until(lambda epoch=epoch: group.epoch == epoch and group.is_attached)
            await lose(first, "for a test")
        await until(lambda: are_all_ready(first))
        assert second.engine.stands_by


async def test_a_worker_that_its_scheduler_refuses_stays_with_that_scheduler() -> None:
    """Without a stream, too, the scheduler says that it lives."""
    async with stage(1) as made:
        first = made.scheduler()
        await until(lambda: are_all_ready(first))
        first.engine.drain_group(first.engine.groups[0].address, "for a test", is_kept=True)
        await until(lambda: not made.workers[0].is_attached)
        second = made.scheduler()
        await until(lambda: second.engine.is_warm)
        await asyncio.sleep(paced(4 * DELAY_S))
        assert second.engine.stands_by


async def test_a_scheduler_says_that_it_lives_although_a_channel_is_closed_meanwhile() -> None:
    """The call under way is cancelled then, as it is when a worker is drained; the rest goes on."""
    async with stage(1) as made:
        first = made.scheduler()
        await until(lambda: are_all_ready(first))
        worker, calls = first.engine.groups[0].worker, 0
        describe = worker.describe

        async def closed_once(*arguments: int) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise asyncio.CancelledError
            return await describe(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(worker), "describe", staticmethod(closed_once))
            await until(lambda: calls > 2)
        assert first.alive is not None and not first.alive.done()


async def test_an_overtaken_scheduler_steps_down_though_its_workers_are_new() -> None:
    """The case in which no epoch of its own tells: it slept while the worker was replaced, too."""
    async with stage(1) as made:
        first = made.scheduler()
        await until(lambda: are_all_ready(first))
        second = made.scheduler()
        await until(lambda: second.engine.is_warm)
        # What the first would do after a long sleep, at another worker that the second has.
        second.engine.take_over(first.engine.term + (1 << 32))
        worker = made.workers[0]
        worker.incarnation += 1
        worker.epoch = second.engine.term
        await lose(first, "the worker is gone")
        assert first.running is not None
        (outcome,) = await asyncio.gather(first.running, return_exceptions=True)
        assert isinstance(outcome, FencedOut)
        assert worker.epoch == second.engine.term, "it took the worker"


async def test_of_several_that_start_at_once_one_is_active() -> None:
    async with stage(3) as made:
        for _ in range(3):
            made.scheduler()

        def is_settled() -> bool:
            running = [one for one in made.made if one.running and not one.running.done()]
            return sum(are_all_ready(one) for one in running) == 1 and all(
                are_all_ready(one) or one.engine.is_warm for one in running
            )

        await until(is_settled)
        for one in made.made:
            assert one.running is not None
            if one.running.done():  # as its process would end, with status 3
                assert isinstance(one.running.exception(), FencedOut)


async def test_workers_of_an_earlier_version_are_not_taken() -> None:
    async with stage(1) as made:
        made.workers[0].tells_holder = False
        one = made.scheduler()
        await until(lambda: "update it" in one.engine.reason)
        await asyncio.sleep(paced(3 * DELAY_S))
        assert one.engine.stands_by and not made.workers[0].epoch


async def test_workers_that_load_are_waited_for() -> None:
    async with stage(1) as made:
        made.workers[0].phase = worker_pb2.WORKER_PHASE_LOADING
        one = made.scheduler()
        await until(lambda: "no worker is ready" in one.engine.reason)
        made.workers[0].phase = worker_pb2.WORKER_PHASE_READY
        await until(lambda: are_all_ready(one))


async def test_a_standby_refuses_requests_by_name() -> None:
    async with stage(1) as made, AsyncExitStack() as stack:
        made.workers[0].phase = worker_pb2.WORKER_PHASE_LOADING
        one = made.scheduler()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service = SchedulerService(one.engine)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
        port = bind(server, "127.0.0.1:0", "test")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        session = stub.Session()
        first = await session.read()
        assert first.draining  # gateways of all versions keep their requests then
        assert await session.code() is grpc.StatusCode.UNAVAILABLE
        assert await session.details() == STANDS_BY
        request = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=[1])
        with pytest.raises(grpc.aio.AioRpcError, match=STANDS_BY):
            await stub.Generate(request).read()


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        (["--standby-delay-s", "0"], "standby_delay_s is 0.0, must be positive"),
        (["--standby-delay-s", "1", "--accept-registrations"], "exclude each other"),
    ):
        with pytest.raises(SystemExit):
            parse(words)
        assert problem in capsys.readouterr().err
