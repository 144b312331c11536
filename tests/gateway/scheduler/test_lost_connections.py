"""What lies between gateway and scheduler loses connections, and frames: no request notices."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from gateway.process.server import LINK_OPTIONS
from gateway.request.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.convert import hello_to_proto, submit_to_proto
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.slots import token_at
from tests.byte_relay import ByteRelay
from tests.pace import patience
from tests.relay import DOWN, UP, OnePlace, frame_relay
from tests.scheduler_svc.conftest import cluster

NUM_REQUESTS, NUM_TOKENS = 8, 60
SLOW = StepTime(base_s=0.01)
VOCAB_SIZE = 32000


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(20)):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def linked(port: int) -> AsyncIterator[SchedulerLink]:
    """A gateway's link to the scheduler at a port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LINK_OPTIONS) as channel:
        link = SchedulerLink(channel, "the scheduler", patience(30))
        running = asyncio.create_task(link.run())
        try:
            await until(lambda: link.is_open)
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def ask(link: SchedulerLink, number: int, num_tokens: int = NUM_TOKENS) -> LiveRequest:
    sampling = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
    return link.submit(Submission(f"r{number}", [1, 2, 3], sampling, Standing(), PrefixReuse()))


async def output(live: LiveRequest) -> list[int]:
    tokens: list[int] = []
    while True:
        arrival = await live.receive()
        tokens += arrival.token_ids
        if arrival.end is not None:
            return tokens


def expected(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    seeds = np.full(num_tokens, number, dtype=np.uint64)
    found: list[int] = token_at(seeds, np.arange(3, 3 + num_tokens), VOCAB_SIZE).tolist()
    return found


async def all_are_right(lives: list[LiveRequest], num_tokens: int = NUM_TOKENS) -> None:
    async with asyncio.timeout(patience(60)):
        found = await asyncio.gather(*map(output, lives))
    assert found == [expected(number, num_tokens) for number in range(len(lives))]


async def test_connections_that_are_reset_again_and_again_lose_no_request() -> None:
    async with cluster(step_time=SLOW) as made, ByteRelay(made.scheduler_port) as relay:
        async with linked(relay.port) as link:
            lives = [ask(link, number, 200) for number in range(NUM_REQUESTS)]
            for number in range(1, 13):
                await until(lambda: link.is_open)
                await asyncio.sleep(0.05)
                relay.reset()
                assert relay.num_resets == number
                await until(lambda: not link.is_open)
            await all_are_right(lives, 200)
        assert made.engine.groups[0].num_recoveries == 0


async def test_connections_cut_in_the_middle_of_a_frame_lose_no_request() -> None:
    async with cluster(step_time=SLOW) as made, ByteRelay(made.scheduler_port) as relay:
        async with linked(relay.port) as link:
            lives = [ask(link, number, 120) for number in range(NUM_REQUESTS)]
            for _ in range(6):
                await asyncio.sleep(0.15)
                relay.cut()
            await all_are_right(lives, 120)
        assert relay.num_resets >= 5


async def test_a_link_that_stands_still_goes_on_with_the_same_stream() -> None:
    async with (
        cluster(step_time=SLOW) as made,
        ByteRelay(made.scheduler_port) as relay,
        linked(relay.port) as link,
    ):
        lives = [ask(link, number) for number in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        relay.stall()
        await asyncio.sleep(1.5)
        relay.go_on()
        await all_are_right(lives)
        assert not any(live.losses_s for live in lives)


async def test_a_new_request_waits_while_the_connection_is_away_as_those_that_run() -> None:
    async with (
        cluster(step_time=SLOW) as made,
        ByteRelay(made.scheduler_port) as relay,
        linked(relay.port) as link,
    ):
        first = ask(link, 0)
        await asyncio.sleep(0.1)
        relay.stall()
        relay.reset()
        await until(lambda: not link.is_open)
        second = ask(link, 1)
        await asyncio.sleep(0.3)
        assert second.is_new and not second._end
        relay.go_on()
        await all_are_right([first, second])


@pytest.mark.parametrize(
    ("what", "direction", "number"),
    [
        ("lose", UP, 3),
        ("repeat", UP, 3),
        ("flip", UP, 3),
        ("lose", DOWN, 1),
        ("lose", DOWN, 25),
        ("repeat", DOWN, 25),
        ("swap", DOWN, 25),
        ("flip", DOWN, 25),
    ],
)
async def test_frames_that_are_lost_repeated_swapped_or_changed_change_no_token(
    what: str, direction: str, number: int
) -> None:
    meddle = OnePlace(direction, number, what)
    async with (
        cluster(step_time=SLOW) as made,
        frame_relay(f"127.0.0.1:{made.scheduler_port}", meddle) as port,
        linked(port) as link,
    ):
        lives = [ask(link, number) for number in range(NUM_REQUESTS)]
        await all_are_right(lives)
        assert meddle.num_done == 1
        assert number == 1 or any(live.losses_s for live in lives), "the stream was lost"


async def test_the_loss_of_the_last_frame_is_noticed_although_no_tokens_follow() -> None:
    num_lost = 0

    def meddle(direction: str, number: int, frame: bytes) -> list[bytes]:
        nonlocal num_lost
        is_end = direction == DOWN and scheduler_pb2.SessionResponse.FromString(frame).finished
        if is_end and not num_lost:
            num_lost += 1
            return []
        return [frame]

    async with (
        cluster() as made,
        frame_relay(f"127.0.0.1:{made.scheduler_port}", meddle) as port,
        linked(port) as link,
    ):
        live = ask(link, 0)
        await all_are_right([live])
        assert num_lost == 1 and len(live.losses_s) == 1


async def test_a_new_stream_of_a_gateway_ends_the_old_one_and_aborts_what_it_had() -> None:
    async with cluster(step_time=SLOW) as made:
        stubs = [scheduler_pb2_grpc.SchedulerServiceStub(made.channel) for _ in range(2)]
        old, new = (stub.Session() for stub in stubs)
        hello = hello_to_proto(7)
        await old.write(hello)
        greeting = await old.read()
        asked = Submission("r", [1, 2, 3], SamplingParams(seed=0), Standing(), PrefixReuse())
        await old.write(submit_to_proto(1, asked))
        await made.until(lambda: list(made.core.live()))
        await new.write(hello)
        assert (await new.read()).greeting.instance == greeting.greeting.instance != 0
        assert not list(made.core.live())
        with pytest.raises(grpc.aio.AioRpcError, match="has opened another stream"):
            while await old.read() is not grpc.aio.EOF:
                pass
        await new.write(submit_to_proto(1, asked))
        await made.until(lambda: list(made.core.live()))
        new.cancel()
