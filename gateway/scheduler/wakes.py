"""Wakes the readers of requests in turn, a few per round of the event loop.

Between two rounds the loop receives other messages. A gateway that keeps up wakes all readers
before the next step; one that lags finds that the requests still queued have more tokens to
deliver, and pays the cost per wake-up, message and write once for all of them. A process that uses
more than half of a core does so before it lags: tokens gather for some milliseconds.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice

from gateway.scheduler.live_request import LiveRequest

WAKES_PER_ROUND = 16  # wakes per round of the event loop: about 0.2 ms of work
# Between these shares of a core that this process uses, the time for which tokens gather stays.
IDLE_SHARE, BUSY_SHARE = 0.3, 0.5
WINDOW_S = 0.05  # in which the share is measured
SHORTEST_GATHER_S = 0.002
GROWTH = 1.5
MOST_WINDOWS = 20  # after so many idle ones nothing is left


class WakePace:
    """The least time from one pass over the readers to the next: 0 unless this process is busy."""

    def __init__(self, longest_s: float, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._longest_s = longest_s
        self._cpu_s = cpu_s
        self._since_s, self._since_cpu_s = time.monotonic(), cpu_s()
        self.gather_s = 0.0

    def observe(self, now_s: float) -> None:
        """Adapts to the share of a core that was used, all threads; call it once per pass."""
        elapsed_s = now_s - self._since_s
        if elapsed_s < WINDOW_S:
            return
        cpu_s = self._cpu_s()
        share = (cpu_s - self._since_cpu_s) / elapsed_s
        self._since_s, self._since_cpu_s = now_s, cpu_s
        if share > BUSY_SHARE:
            longer_s = max(GROWTH * self.gather_s, SHORTEST_GATHER_S)
            self.gather_s = min(longer_s, self._longest_s)
        elif share < IDLE_SHARE:
            num_windows = min(elapsed_s / WINDOW_S, MOST_WINDOWS)
            shorter_s = self.gather_s / GROWTH**num_windows
            self.gather_s = shorter_s if shorter_s >= SHORTEST_GATHER_S else 0.0


class WakeQueue:
    """Requests whose readers are to be woken, in passes: each reader once per pass."""

    def __init__(self, pace: WakePace) -> None:
        self._pace = pace
        # In order, each once: those that this pass has still to wake, and those of the next one.
        self._waiting: dict[LiveRequest, None] = {}
        self._next: dict[LiveRequest, None] = {}
        self._began_s = 0.0  # the last pass
        self._planned: asyncio.Handle | None = None  # the next pass

    def add(self, touched: Iterable[LiveRequest]) -> None:
        """Queues requests with new tokens or an end. First tokens do not wait for others.

        A reader that this pass has woken already has to wait for the next one: else a pass that
        takes longer than a step would never end, and no tokens gather.
        """
        if not self._waiting:
            self._next.update(added := dict.fromkeys(touched))
            self._plan(at_once=not all(live.has_delivered for live in added))
            return
        for live in touched:
            if live not in self._waiting:
                queue = self._next if live.has_delivered else self._waiting
                queue[live] = None

    def _plan(self, *, at_once: bool = False) -> None:
        wait_s = self._began_s + self._pace.gather_s - time.monotonic()
        if at_once or wait_s <= 0:
            self._begin()
        elif self._planned is None:
            self._planned = asyncio.get_running_loop().call_later(wait_s, self._begin)

    def _begin(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        self._began_s = time.monotonic()
        self._pace.observe(self._began_s)
        self._waiting, self._next = self._next, {}
        self._run()

    def _run(self) -> None:
        for live in list(islice(self._waiting, WAKES_PER_ROUND)):
            del self._waiting[live]
            live.wake()
        loop = asyncio.get_running_loop()
        if self._waiting:
            loop.call_soon(self._run)
        elif self._next:
            self._planned = loop.call_soon(self._plan_next)

    def _plan_next(self) -> None:
        self._planned = None
        self._plan()
