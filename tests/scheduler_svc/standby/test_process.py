"""Two schedulers as processes, a gateway's link to both, and a fake worker.

Whatever happens to the active one, each request has the tokens that it has undisturbed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from gateway.process.server import LINK_OPTIONS
from gateway.request.generation import Finish, PrefixReuse, SamplingParams, Standing
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission
from gateway.scheduler.target import scheduler_target
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeWorker, start
from tests.e2e.forks import warm
from tests.pace import paced, patience
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
NUM_REQUESTS, NUM_TOKENS = 6, 250
STEP = StepTime(base_s=0.01)
FENCED_OUT = 3


@dataclass(slots=True)
class Pair:
    """Two schedulers as processes, of which one is active, and the gateway's link."""

    worker: FakeWorker
    worker_port: int
    link: SchedulerLink
    ports: list[int]
    folder: Path  # of logs
    processes: dict[int, warm.Fork] = field(default_factory=dict)
    stubs: "dict[int, scheduler_pb2_grpc.SchedulerServiceAsyncStub]" = field(default_factory=dict)

    def start(self, port: int) -> None:
        """Starts the scheduler of one port."""
        options = (
            *("--worker", f"127.0.0.1:{self.worker_port}", "--port", str(port)),
            *("--standby-delay-s", f"{paced(0.5):.2f}", "--drain-timeout-s", "0.1"),
            *("--heartbeat-timeout-s", f"{paced(1.5):.2f}"),
        )
        log = self.folder / f"{port}.log"
        self.processes[port] = warm.start("scheduler_svc", options, ROOT, log, os.environ)

    async def ask(self, port: int) -> scheduler_pb2.GetStatusResponse | None:
        """A scheduler's status; None if it does not answer."""
        try:
            return await self.stubs[port].GetStatus(
                scheduler_pb2.GetStatusRequest(), timeout=patience(1)
            )
        except grpc.aio.AioRpcError:
            return None

    async def is_active(self, port: int) -> bool:
        status = await self.ask(port)
        return status is not None and status.ready

    async def is_warm(self, port: int) -> bool:
        status = await self.ask(port)
        return status is not None and status.stands_by and "another scheduler" in status.reason

    async def settle(self) -> tuple[int, int]:
        """Starts what does not run; the ports of the active one and of the standby.

        Of two that take over at once one ends, and is started again, as by any supervisor.
        """
        async with asyncio.timeout(patience(40)):
            while True:
                for port in self.ports:
                    if port not in self.processes:
                        self.start(port)
                self.restart_fenced_out()
                for active, other in (self.ports, self.ports[::-1]):
                    if await self.is_active(active) and await self.is_warm(other):
                        return active, other
                await asyncio.sleep(0.05)

    def restart_fenced_out(self) -> None:
        """Starts those again that another scheduler has fenced out."""
        for port, process in list(self.processes.items()):
            if process.poll() == FENCED_OUT:
                self.start(port)

    def story(self) -> str:
        """The state of both schedulers, for a test that fails."""
        ends = {port: process.poll() for port, process in self.processes.items()}
        logs = [f"{port}\n{(self.folder / f'{port}.log').read_text()}" for port in self.ports]
        return "\n".join([f"exit codes {ends}, the worker's epoch {self.worker.epoch}", *logs])

    async def until_active(self, port: int) -> None:
        async with asyncio.timeout(patience(40)):
            while not await self.is_active(port):
                await asyncio.sleep(0.05)

    async def answers(self, disturb: Callable[[], None] | None = None) -> list[list[int]]:
        """The tokens of some requests, while something happens to the schedulers."""
        async with asyncio.timeout(patience(60)):
            while not self.link.is_open:
                await asyncio.sleep(0.05)
            lives = [self.link.submit(_asked(number)) for number in range(NUM_REQUESTS)]
            while min(len(live.output_token_ids) for live in lives) < 20:
                await asyncio.sleep(0.01)
            if disturb is not None:
                disturb()
            late = self.link.submit(_asked(NUM_REQUESTS))  # held, if there is no scheduler
            told = [await _end_of(live) for live in (*lives, late)]
            for live in lives:
                self.link.close(live)
            return told

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Restarts what is fenced out meanwhile; a failure tells what the schedulers logged."""

        async def restart() -> None:
            while True:
                self.restart_fenced_out()
                await asyncio.sleep(0.1)

        restarting = asyncio.create_task(restart())
        try:
            yield
        except TimeoutError as late:
            raise AssertionError(self.story()) from late
        finally:
            restarting.cancel()


def _asked(number: int) -> Submission:
    sampling = SamplingParams(seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
    return Submission(f"r{number}", [5, 6, 7 + number], sampling, Standing(), PrefixReuse())


async def _end_of(live: LiveRequest) -> list[int]:
    while live._end is None:
        await asyncio.sleep(0.02)
    assert isinstance(live._end, Finish), live._end
    return live.output_token_ids


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    worker = FakeWorker(step_time=STEP)
    server, worker_port = await start(worker, "127.0.0.1:0")
    ports = [free_port(), free_port()]
    target = scheduler_target(",".join(f"127.0.0.1:{p}" for p in ports), "", uses_tls=False)
    options = [*LINK_OPTIONS, *target.options]
    async with grpc.aio.insecure_channel(target.name, options=options) as channel:
        link = SchedulerLink(channel, target.name, patience(60), has_standby=True)
        running = asyncio.create_task(link.run())
        made = Pair(worker, worker_port, link, ports, folder)
        channels = {port: grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports}
        for port, own in channels.items():
            made.stubs[port] = scheduler_pb2_grpc.SchedulerServiceStub(own)
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for process in made.processes.values():
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            for own in channels.values():
                await own.close()
            await server.stop(None)


async def test_a_stopped_scheduler_wakes_up_and_steps_down(tmp_path: Path) -> None:
    async with pair(tmp_path) as made:
        active, other = await made.settle()
        calm = await made.answers()
        stopped = made.processes[active]
        answers = asyncio.create_task(made.answers(lambda: stopped.send_signal(signal.SIGSTOP)))
        await made.until_active(other)
        epoch = made.worker.epoch
        stopped.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(stopped.wait, patience(30)) == FENCED_OUT
        assert await answers == calm
        assert made.worker.epoch == epoch, "it took the worker back"
        assert await made.settle() == (other, active)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_standby_follows_a_scheduler_that_ends(
    how: signal.Signals, tmp_path: Path
) -> None:
    async with pair(tmp_path) as made:
        active, other = await made.settle()
        calm = await made.answers()
        ended = made.processes.pop(active)
        assert await made.answers(lambda: ended.send_signal(how)) == calm
        assert await asyncio.to_thread(ended.wait, patience(30)) == (0 if how == 15 else -how)
        assert await made.is_active(other)
        assert await made.settle() == (other, active)


async def test_a_standby_that_dies_is_not_missed_and_both_may_die(tmp_path: Path) -> None:
    async with pair(tmp_path) as made:
        _, other = await made.settle()
        calm, epoch = await made.answers(), made.worker.epoch
        gone = made.processes.pop(other)
        assert await made.answers(gone.kill) == calm
        assert gone.wait() == -signal.SIGKILL
        assert made.worker.epoch == epoch
        await made.settle()
        both = list(made.processes.values())

        def kill_both() -> None:
            for process in both:
                process.kill()
                process.wait()
            for port in made.ports:
                made.start(port)

        async with made.supervised():  # two that begin at once may both take the worker
            assert await made.answers(kill_both) == calm
