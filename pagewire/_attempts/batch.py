"""Calls that are sent until they are answered: one, or many with bounded concurrency.

Results are in order. A failure cancels the rest and is raised, or it is kept in the place of its
result.
"""

import asyncio
import heapq
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from pagewire._attempts.plan import WholeCall
from pagewire._errors import PagewireError
from pagewire._types import Completion

DEFAULT_MAX_CONCURRENCY = 32

BatchResult = Completion | PagewireError
Begin = Callable[[], WholeCall[Any]]  # plans a call when its turn comes


class _CallFuture(Protocol):
    """The part of a gRPC call in flight that is used."""

    def add_done_callback(self, fn: Callable[[object], None]) -> None: ...
    def cancel(self) -> bool: ...
    def result(self) -> Any: ...


def answer(method: "grpc.UnaryUnaryMultiCallable[Any, Any]", call: WholeCall[Any]) -> Completion:
    """The answer to a call, over all its attempts. Raises PagewireError."""
    while True:
        try:
            return call.completion(method(call.request, **call.terms))
        except grpc.RpcError as error:
            pause_s = call.pause_s(error)
        time.sleep(pause_s)


async def aio_answer(
    method: "grpc.aio.UnaryUnaryMultiCallable[Any, Any]", call: WholeCall[Any]
) -> Completion:
    """As `answer`, for asyncio."""
    while True:
        try:
            return call.completion(await method(call.request, **call.terms))
        except grpc.RpcError as error:
            pause_s = call.pause_s(error)
        await asyncio.sleep(pause_s)


@dataclass(slots=True)
class _InFlight:
    call: WholeCall[Any]
    future: _CallFuture


@dataclass(slots=True)
class _Run:
    """A batch of a blocking client while it runs."""

    method: "grpc.UnaryUnaryMultiCallable[Any, Any]"
    begin: Sequence[Begin]
    live: dict[int, _InFlight] = field(default_factory=dict)
    paused: list[tuple[float, int]] = field(default_factory=list)  # (time of the retry, index)
    calls: dict[int, WholeCall[Any]] = field(default_factory=dict)
    finished: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)

    @property
    def num_open(self) -> int:
        return len(self.calls)

    def launch(self, index: int) -> None:
        """Sends a call for the first time, or again."""
        if index not in self.calls:
            self.calls[index] = self.begin[index]()
        call = self.calls[index]
        future: _CallFuture = self.method.future(call.request, **call.terms)
        self.live[index] = _InFlight(call, future)
        self.live[index].future.add_done_callback(lambda _: self.finished.put(index))

    def next_result(self) -> tuple[int, BatchResult] | None:
        """Waits for one end, or for the time of a retry; None if no call has its result yet."""
        now_s = time.monotonic()
        while self.paused and self.paused[0][0] <= now_s:
            self.launch(heapq.heappop(self.paused)[1])
        try:
            timeout_s = self.paused[0][0] - now_s if self.paused else None
            index = self.finished.get(timeout=timeout_s)
        except queue.Empty:
            return None
        flight = self.live.pop(index)
        try:
            result: BatchResult = flight.call.completion(flight.future.result())
        except grpc.RpcError as error:
            try:
                pause_s = flight.call.pause_s(error)
            except PagewireError as failure:
                result = failure
            else:
                heapq.heappush(self.paused, (time.monotonic() + pause_s, index))
                return None
        except PagewireError as failure:
            result = failure
        del self.calls[index]
        return index, result


def run(
    method: "grpc.UnaryUnaryMultiCallable[Any, Any]",
    calls: Sequence[Begin],
    max_concurrency: int,
    advance: Callable[[], None],
    keeps_errors: bool,
) -> list[BatchResult]:
    """The results, in the order of the calls. Leaving early cancels the calls in flight."""
    check_concurrency(max_concurrency)
    results: dict[int, BatchResult] = {}
    running = _Run(method, calls)
    unstarted = deque(range(len(calls)))
    try:
        while unstarted or running.num_open:
            while unstarted and running.num_open < max_concurrency:
                running.launch(unstarted.popleft())
            if (ended := running.next_result()) is None:
                continue
            index, result = ended
            if isinstance(result, PagewireError) and not keeps_errors:
                raise result
            results[index] = result
            advance()
    finally:
        for flight in running.live.values():
            flight.future.cancel()
    return [results[index] for index in range(len(calls))]


async def aio_run(
    method: "grpc.aio.UnaryUnaryMultiCallable[Any, Any]",
    calls: Sequence[Begin],
    max_concurrency: int,
    advance: Callable[[], None],
    keeps_errors: bool,
) -> list[BatchResult]:
    """As `run`, for asyncio."""
    check_concurrency(max_concurrency)
    results: dict[int, BatchResult] = {}
    unstarted = iter(enumerate(calls))

    async def work() -> None:
        for index, begin in unstarted:
            try:
                results[index] = await aio_answer(method, begin())
            except PagewireError as failure:
                if not keeps_errors:
                    raise
                results[index] = failure
            advance()

    workers = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(calls)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(calls))]


def check_concurrency(max_concurrency: int) -> None:
    """Raises ValueError unless max_concurrency is at least 1."""
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency: {max_concurrency} is not at least 1")
