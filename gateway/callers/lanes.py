"""Threads of one kind of work, for which callers take turns.

Each caller has a queue, and the callers' queues take turns. Work whose caller has left leaves its
queue; what a thread has begun it ends.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


def _nothing() -> None:
    pass


class Lane:
    """Some threads, and the callers that wait for one."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        # First is the caller whose turn is next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(
        self, client: str, work: Callable[[], Result], on_end: Callable[[], None] = _nothing
    ) -> Result:
        """The result; `on_end` is called once, when no thread works at it any more."""
        try:
            await self._turn(client)
        except BaseException:
            on_end()
            raise
        running = self._threads.submit(copy_context().run, work)
        ended = partial(self._ended, on_end)
        running.add_done_callback(partial(_tell, asyncio.get_running_loop(), ended))
        return await asyncio.wrap_future(running)

    def _ended(self, on_end: Callable[[], None]) -> None:
        self._pass_on()
        on_end()

    async def _turn(self, client: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it had come already
            else:
                self._forget(client, turn)
            raise

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, deque())
        with suppress(ValueError):  # passed on to another since it was cancelled
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _pass_on(self) -> None:
        """Gives a turn that has ended to the next caller."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after all others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


def _tell(loop: asyncio.AbstractEventLoop, ended: Callable[[], None], _: Future[Result]) -> None:
    with suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(ended)
