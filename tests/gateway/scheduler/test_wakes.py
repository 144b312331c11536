"""Wakes of readers: some per round of the loop; in a busy process tokens gather."""

import asyncio
import time
from collections.abc import Coroutine

import pytest

from gateway.request.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.live_request import LiveRequest, Submission
from gateway.scheduler.wakes import WAKES_PER_ROUND, WakePace, WakeQueue
from simulator.chaos import virtual_time

STEP_S, GATHER_S = 0.008, 0.02
ASKED = Submission("a", [1], SamplingParams(), Standing(), PrefixReuse())


@pytest.mark.asyncio
async def test_a_reader_behind_others_gets_tokens_of_two_steps_at_once_and_nobody_waits_twice() -> (
    None
):
    lives = [LiveRequest(handle, ASKED) for handle in range(2 * WAKES_PER_ROUND)]
    reading = [asyncio.create_task(live.receive()) for live in lives]
    await asyncio.sleep(0)
    wakes = WakeQueue(WakePace(0.0))
    for token_id in (7, 8):  # two steps in one round of the loop
        for live in lives:
            live.add(token_id, None)
        wakes.add(lives)
        if token_id == 7:
            await asyncio.sleep(0)  # readers of step 7 run before step 8 arrives
    arrivals = await asyncio.gather(*reading)
    assert arrivals[0].token_ids == [7]
    assert arrivals[-1].token_ids == [7, 8]
    again = asyncio.create_task(lives[0].receive())
    assert (await again).token_ids == [8]


class Core:
    """A core of the virtual clock, of which this process uses a share."""

    def __init__(self) -> None:
        self.share = 0.0
        self._at_s, self._used_s = time.monotonic(), 0.0

    def used_s(self) -> float:
        now_s = time.monotonic()
        self._used_s += self.share * (now_s - self._at_s)
        self._at_s = now_s
        return self._used_s


class Stream:
    """One request, a reader that notes when it reads, and the steps of a scheduler."""

    def __init__(self, wakes: WakeQueue) -> None:
        self.live = LiveRequest(1, ASKED)
        self.read: list[tuple[float, list[int]]] = []  # seconds after the last step, tokens
        self._wakes = wakes
        self._stepped_s = 0.0
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            arrival = await self.live.receive()
            self.read.append((time.monotonic() - self._stepped_s, arrival.token_ids))

    async def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._stepped_s = time.monotonic()
            self.live.add(5, None)
            self._wakes.add([self.live])
            await asyncio.sleep(STEP_S)


def run(main: Coroutine[object, object, None]) -> None:
    virtual_time.run(main)


def test_a_process_that_uses_less_than_half_of_a_core_delays_no_token() -> None:
    async def main() -> None:
        core = Core()
        stream = Stream(WakeQueue(WakePace(GATHER_S, core.used_s)))
        core.share = 0.49
        await stream.play(100)
        assert stream.read == [(0.0, [5])] * 100

    run(main())


def test_tokens_gather_in_a_busy_process_and_no_longer_when_it_is_idle_again() -> None:
    async def main() -> None:
        core = Core()
        stream = Stream(WakeQueue(WakePace(GATHER_S, core.used_s)))
        core.share = 0.9
        await stream.play(300)
        busy = stream.read[-20:]
        assert {len(token_ids) for _, token_ids in busy} <= {2, 3}
        assert max(delay_s for delay_s, _ in busy) < STEP_S  # the newest; the oldest waited longer
        assert stream.read[0] == (0.0, [5])
        core.share = 0.2
        await stream.play(300)
        assert stream.read[-20:] == [(0.0, [5])] * 20
        await asyncio.sleep(1)
        assert sum(len(token_ids) for _, token_ids in stream.read) == 600
        core.share = 0.9
        await stream.play(300)
        core.share = 0.0
        await asyncio.sleep(1)
        await stream.play(3)
        assert stream.read[-2:] == [(0.0, [5])] * 2

    run(main())


def test_tokens_gather_while_the_last_ones_are_written() -> None:
    async def main() -> None:
        core = Core()
        wakes = WakeQueue(WakePace(GATHER_S, core.used_s))
        core.share = 0.9
        await Stream(wakes).play(300)
        live = LiveRequest(2, ASKED)
        live.add(1, None)
        wakes.add([live])
        assert (await live.receive()).token_ids == [1]
        live.add(2, None)
        wakes.add([live])
        began_s = time.monotonic()
        assert (await live.receive()).token_ids == [2]
        assert time.monotonic() - began_s == pytest.approx(GATHER_S)

    run(main())


def test_tokens_gather_where_a_pass_over_all_readers_takes_longer_than_a_step() -> None:
    async def main() -> None:
        core = Core()
        wakes = WakeQueue(WakePace(GATHER_S, core.used_s))
        core.share = 0.9
        await Stream(wakes).play(300)
        streams = [Stream(wakes) for _ in range(10 * WAKES_PER_ROUND)]
        for _ in range(12):
            for stream in streams:
                stream.live.add(5, None)
            wakes.add([stream.live for stream in streams])
            for _ in range(8):  # rounds, of which a pass needs ten
                await asyncio.sleep(STEP_S / 8)
        await asyncio.sleep(2 * GATHER_S)
        for stream in streams:
            assert [len(token_ids) for _, token_ids in stream.read].count(0) == 0
            assert sum(len(token_ids) for _, token_ids in stream.read) == 12
            assert len(stream.read) <= 6

    run(main())


def test_a_first_token_waits_for_no_other() -> None:
    async def main() -> None:
        core = Core()
        wakes = WakeQueue(WakePace(GATHER_S, core.used_s))
        core.share = 0.9
        await Stream(wakes).play(300)
        new = Stream(wakes)
        await new.play(1)
        assert new.read == [(0.0, [5])]

    run(main())
