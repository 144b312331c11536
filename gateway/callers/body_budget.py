"""The memory of bodies that are received and read, of all clients and of each.

A body counts from its first byte until its answer begins or it became tokens, whose number the
model bounds. What is taken is given back in every way a request can end.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gateway.callers.text_turns import MIB
from gateway.errors.request_errors import ErrorKind, RequestError


class BodyBudget:
    """The bytes of all bodies, over HTTP and gRPC together."""

    def __init__(self, max_bytes: int, max_bytes_per_client: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_client = max_bytes_per_client
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    @contextmanager
    def share_of(self, client: str) -> Iterator["BodyShare"]:
        """The share of one request of a client; given back at the end of the block."""
        share = BodyShare(self, client)
        token = _CURRENT.set(share)
        try:
            yield share
        finally:
            _CURRENT.reset(token)
            share.give_back()

    def take(self, client: str, num_bytes: int) -> None:
        """Counts bytes. Raises RequestError beyond a limit."""
        most, most_of_client = self._max_bytes, self._max_bytes_per_client
        if self._held[client] + num_bytes > most_of_client:
            told = f"this client's are at {most_of_client // MIB} MiB (--max-bodies-mib-per-client)"
        elif self.num_bytes + num_bytes > most:
            told = f"those of all clients are at {most // MIB} MiB (--max-bodies-mib)"
        else:
            self._held[client] += num_bytes
            self.num_bytes += num_bytes
            return
        problem = f"too many bytes of bodies are being received: {told}"
        raise RequestError(ErrorKind.OVERLOADED, problem)

    def give_back(self, client: str, num_bytes: int) -> None:
        """Ends the count of bytes that were taken."""
        self.num_bytes -= num_bytes
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]


class BodyShare:
    """The bytes of one body."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0
        self._weight = 1

    def hold(self, num_bytes: int, weight: int = 1) -> None:
        """Counts a body that is `num_bytes` long by now, each of which may cost `weight` bytes.

        Raises RequestError beyond a limit.
        """
        more = num_bytes * weight - self._num_bytes
        if more > 0:
            self._budget.take(self._client, more)
            self._num_bytes += more
        self._weight = weight

    def give_back(self, num_bytes: int | None = None) -> None:
        """Gives back all or at most so many bytes."""
        given = self._num_bytes if num_bytes is None else min(num_bytes, self._num_bytes)
        if given:
            self._num_bytes -= given
            self._budget.give_back(self._client, given)

    def became_tokens(self, num_characters: int) -> None:
        """Gives back the bytes of so many characters."""
        self.give_back(num_characters * self._weight)


# Of the request that the current task serves.
_CURRENT: ContextVar[BodyShare | None] = ContextVar("BODY_SHARE", default=None)


def became_tokens(num_characters: int) -> None:
    """Tells the body of the current request that so many of its characters are tokens now."""
    share = _CURRENT.get()
    if share is not None:
        share.became_tokens(num_characters)
