"""Work on texts, off the event loop: callers take turns, and what waits is bounded.

Two lanes have threads of their own, so a short text never waits for a long one. In a lane each
caller has a queue, and the callers' queues take turns. Work whose caller has left leaves its queue;
what a thread has begun it ends, and counts until then.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from gateway.callers.auth import CLIENT
from gateway.callers.freed import return_memory
from gateway.callers.lanes import Lane
from gateway.errors.request_errors import ErrorKind, RequestError

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
        self._short = Lane("short-texts", NUM_SHORT_THREADS)
        self._long = Lane("long-texts", 1)
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


def _then_trim(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        return_memory()
