"""An event loop whose clock jumps: whoever sleeps wakes as soon as everybody else sleeps, too.

One thread, no sockets, no real time. What runs on it runs in the same order every time. While it
runs, `time.monotonic` tells its time: production code that reads the clock reads this one.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")
START_S = 1000.0  # as good as any, and not 0


class Deadlock(Exception):
    """Everybody waits for somebody else, and no timer will wake any of them."""


class _Jump(selectors.SelectSelector):
    """Where a loop would wait for sockets, this one moves its clock to the next timer."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now_s:.3f} s")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop over a clock of its own."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(main: Coroutine[object, object, T]) -> T:
    """Runs a coroutine to its end, and whatever it left behind. Raises Deadlock."""
    loop, real = VirtualLoop(), time.monotonic
    time.monotonic = loop.time
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
        loop.close()
        time.monotonic = real


async def _cancel(tasks: set[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
