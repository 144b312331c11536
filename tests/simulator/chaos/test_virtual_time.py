"""The event loop with a virtual clock."""

import asyncio
import time

import pytest

from simulator.chaos import virtual_time
from simulator.chaos.virtual_time import Deadlock


async def nap(seconds: float, told: list[float]) -> None:
    await asyncio.sleep(seconds)
    told.append(seconds)


def test_hours_pass_in_no_time_and_in_order() -> None:
    told: list[float] = []

    async def main() -> float:
        began_s = time.monotonic()
        await asyncio.gather(nap(7200, told), nap(3600, told), nap(0.001, told))
        return time.monotonic() - began_s

    began_s = time.monotonic()
    assert virtual_time.run(main()) == pytest.approx(7200)
    assert told == [0.001, 3600, 7200] and time.monotonic() - began_s < 3600


def test_whoever_waits_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        virtual_time.run(main())


def test_what_is_left_behind_is_cancelled_and_the_clock_is_real_again() -> None:
    told: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            told.append("cancelled")

    async def main(leaves: bool) -> asyncio.Task[None] | None:
        task = asyncio.create_task(left()) if leaves else None
        await asyncio.sleep(1)
        return task

    real = time.monotonic
    for leaves in (True, False):
        virtual_time.run(main(leaves))
    assert told == ["cancelled"] and time.monotonic is real
