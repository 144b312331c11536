"""Work on texts, off the event loop: callers take turns, and what waits is bounded.

Two lanes have threads of their own, so a short text never waits for a long one. In a lane each
caller has a queue, and the callers' queues take turns. Work whose caller has left leaves its queue;
what a thread has begun it ends, and counts until then.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from gateway.auth import CLIENT
from gateway.errors import ErrorKind, RequestError
from gateway.tokens.freed import return_memory

MIB = 1 << 20
SHORT_BYTES = 64 << 10  # at most tens of milliseconds, and tens of MiB
NUM_SHORT_THREADS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of the texts that are read at once, in bytes of UTF-8."""

    max_text: int = 1 * MIB  # one; a prompt may have more where the model reads more
    max_total: int = 32 * MIB  # waiting or at work, of all callers
    max_per_client: int = 8 * MIB


DEFAULT_LIMITS = TextLimits()


class TextTurns:
    """Both lanes, and the bytes that are in them."""

    def __init__(self, limits: TextLimits) -> None:
        self._limits = limits
        self._short = _Lane("short-texts", NUM_SHORT_THREADS)
        self._long = _Lane("long-texts", 1)
        self._num_bytes: Counter[str] = Counter()  # by client

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts that wait or are at work."""
        return self._num_bytes.total()

    async def run(self, field: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        """The result of work on a text of so many bytes. Raises RequestError beyond a limit."""
        client = CLIENT.get()
        self._check(field, client, num_bytes)
        is_short = num_bytes <= SHORT_BYTES
        lane = self._short if is_short else self._long
        self._num_bytes[client] += num_bytes
        leave = partial(self._leave, client, num_bytes)
        return await lane.run(client, work if is_short else partial(_then_trim, work), leave)

    def _check(self, field: str, client: str, num_bytes: int) -> None:
        """Raises RequestError where the text finds no room; the only one always has it."""
        limits, others = self._limits, self._num_bytes
        if others[client] and others[client] + num_bytes > limits.max_per_client:
            option, most = "--max-tokenizing-mib-per-client", limits.max_per_client
        elif others and self.num_bytes + num_bytes > limits.max_total:
            option, most = "--max-tokenizing-mib", limits.max_total
        else:
            return
        problem = f"too many texts wait to be tokenized, {option} is {most // MIB}"
        raise RequestError(ErrorKind.OVERLOADED, f"{field}: {problem}", field=field)

    def _leave(self, client: str, num_bytes: int) -> None:
        self._num_bytes[client] -= num_bytes
        if not self._num_bytes[client]:
            del self._num_bytes[client]


class _Lane:
    """Some threads, and the callers that wait for one."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        # First is the caller whose turn is next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(
        self, client: str, work: Callable[[], Result], on_end: Callable[[], None]
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


def _then_trim(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        return_memory()


def _tell(loop: asyncio.AbstractEventLoop, ended: Callable[[], None], _: Future[Result]) -> None:
    with suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(ended)
