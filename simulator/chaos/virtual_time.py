"""An event loop whose clock jumps to the next timer as soon as every task waits.

One thread, no sockets, no real time; the order of execution is always the same. While it runs,
`time.monotonic` returns its time, so that production code reads this clock.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")
START_S = 1000.0  # arbitrary, but not 0


class Deadlock(Exception):
    """Raised when every task waits and no timer is set."""


class _Jump(selectors.SelectSelector):
    """Replaces the wait for sockets: moves the clock to the next timer."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now_s:.3f} s")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop over a virtual clock."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(main: Coroutine[object, object, T]) -> T:
    """Runs a coroutine to its end, and the tasks that it left. Raises Deadlock."""
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
