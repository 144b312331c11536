"""Many calls with bounded concurrency: results in order; the first failure cancels the rest."""

import asyncio
import queue
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

DEFAULT_MAX_CONCURRENCY = 32

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result", covariant=True)


class _CallFuture(Protocol[_Result]):
    """The part of a gRPC call in flight that is used."""

    def add_done_callback(self, fn: Callable[[object], None]) -> None: ...
    def cancel(self) -> bool: ...
    def result(self) -> _Result: ...


def run(
    start: Callable[[_Request], _CallFuture[_Response]],
    requests: Sequence[_Request],
    max_concurrency: int,
    advance: Callable[[], None],
) -> list[_Response]:
    """The responses, in the order of the requests. Any failure cancels the calls in flight."""
    check_concurrency(max_concurrency)
    responses: dict[int, _Response] = {}
    live: dict[int, _CallFuture[_Response]] = {}
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()

    def launch(index: int) -> None:
        live[index] = start(requests[index])
        live[index].add_done_callback(lambda _: finished.put(index))

    unstarted = deque(range(len(requests)))
    try:
        while unstarted or live:
            while unstarted and len(live) < max_concurrency:
                launch(unstarted.popleft())
            index = finished.get()
            responses[index] = live.pop(index).result()
            advance()
    finally:
        for call in live.values():
            call.cancel()
    return [responses[index] for index in range(len(requests))]


async def run_aio(
    call: Callable[[_Request], Awaitable[_Response]],
    requests: Sequence[_Request],
    max_concurrency: int,
    advance: Callable[[], None],
) -> list[_Response]:
    """As `run`, for asyncio."""
    check_concurrency(max_concurrency)
    responses: dict[int, _Response] = {}
    unstarted = iter(enumerate(requests))

    async def work() -> None:
        for index, request in unstarted:
            responses[index] = await call(request)
            advance()

    workers = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(requests)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [responses[index] for index in range(len(requests))]


def check_concurrency(max_concurrency: int) -> None:
    """Raises ValueError unless max_concurrency is at least 1."""
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency: {max_concurrency} is not at least 1")
