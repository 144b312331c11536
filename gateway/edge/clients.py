"""Counts the requests that each client has open; refuses more than its share.

A client is an API key where keys are needed, else an address: without keys anything may stand in
the header, and a new value would be a new client.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gateway.callers.auth import CLIENT
from gateway.errors.request_errors import ErrorKind, RequestError
from wire.identity.access import CALLER


def client_at(address: str) -> str:
    """The name of the client that the current task serves, for what is counted by client."""
    caller = CALLER.get()
    return address if caller is None else f"key {caller.name}"


class OpenRequests:
    """The open requests of all clients, over HTTP and gRPC together."""

    def __init__(
        self, max_per_client: int, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Each request runs within a context made by `around`."""
        self._max_per_client = max_per_client
        self._around = around
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, address: str) -> Iterator[None]:
        """Counts one request until the end of the block, whose task then knows its client.

        Raises RequestError beyond the limit.
        """
        client = client_at(address)
        CLIENT.set(client)
        if self._open[client] >= self._max_per_client:
            problem = (
                f"this client has {self._open[client]} requests open, --max-streams-per-client is "
                f"{self._max_per_client}"
            )
            raise RequestError(ErrorKind.OVERLOADED, problem)
        self._open[client] += 1
        try:
            with self._around():
                yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
