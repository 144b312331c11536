"""Streams of outputs, for threads and for asyncio. Leaving a stream cancels its call.

A stream that breaks because the connection or the gateway is lost is opened again after the tokens
received, so its reader only sees a pause.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, Self

import grpc

from pagewire._attempts.plan import StreamCallPlan
from pagewire._attempts.resume import Reopen
from pagewire._errors import Aborted, Cancelled, from_rpc_error
from pagewire._types import Completion, Delta
from pagewire.v1 import inference_pb2 as pb

_Response = pb.GenerateStreamResponse | pb.ChatStreamResponse


class _Output:
    """State of a stream: the output so far, and how to cancel the call."""

    def __init__(self, cancel: Callable[[], bool], plan: StreamCallPlan[Any]) -> None:
        self._target = plan.target
        self._patience = plan.patience
        self._attempts = plan.attempts
        self._assembly = plan.assembly
        self._closed = threading.Event()
        self._has_begun = False
        self._hold(cancel)

    def _hold(self, cancel: Callable[[], bool]) -> None:
        """Makes this call the one to cancel when the stream is left."""
        self._cancel = weakref.finalize(self, cancel)
        self._cancel.atexit = False

    def _read(self, response: _Response) -> Delta:
        if not self._has_begun:
            self._has_begun = True
            self._attempts.note_answer()
        self._patience.note(bool(response.delta.token_ids))
        return self._assembly.read(response)

    def _is_whole(self, error: grpc.RpcError) -> bool:
        """True if the connection was lost after the end of all outputs: nothing is missing."""
        return self._assembly.is_finished and error.code() is grpc.StatusCode.UNAVAILABLE

    def _pause_s(self, error: grpc.RpcError) -> float:
        """Seconds to wait before opening the stream again; raises an error that is not retried."""
        pause_s = None
        if not (self._closed.is_set() or self._assembly.is_finished):
            if not self._has_begun:
                pause_s = self._attempts.refusal_pause_s(error)
            if pause_s is None:
                pause_s = self._patience.pause_s(error)
                self._assembly.is_resumed = self._has_begun
        if self._patience.is_poison:
            num_deaths = self._patience.num_deaths_in_all
            message = f"{num_deaths} gateways, one after the other, died while this request ran"
            raise Aborted(f"{message}; it is not submitted again", code="ABORTED") from None
        if pause_s is None:
            raise from_rpc_error(error, self._target) from None
        return pause_s

    @property
    def request_id(self) -> str:
        """The request's id; empty before the first piece."""
        return self._assembly.request_id

    @property
    def text(self) -> str:
        """The text so far, of the first output."""
        return self._assembly.text

    def close(self) -> None:
        """Cancels the request if it still runs; from any thread, unless the stream is asyncio's."""
        self._closed.set()
        self._cancel()

    def _check_open(self) -> None:
        """Raises Cancelled if the stream was closed."""
        if self._closed.is_set():
            raise Cancelled("the stream was closed", code="CANCELLED") from None


class StreamCall(Protocol):
    """The part of a gRPC stream that is used."""

    def __next__(self) -> _Response: ...
    def cancel(self) -> bool: ...


class AsyncStreamCall(Protocol):
    """The part of an asyncio gRPC stream that is used."""

    def __aiter__(self) -> AsyncIterator[_Response]: ...
    def cancel(self) -> bool: ...


class Stream(_Output, Iterator[Delta]):
    """Iterator over the pieces of an output as Delta; of several outputs, each with its index.

    Leaving early stops the generation on the server: `close()`, the end of a `with` block, and
    dropping the last reference all cancel the call. Raises PagewireError when the stream fails.
    """

    def __init__(self, reopen: Reopen[StreamCall], plan: StreamCallPlan[Any]) -> None:
        self._call = reopen((), 0, 0)
        self._reopen = reopen
        super().__init__(self._call.cancel, plan)

    def __next__(self) -> Delta:
        while True:
            try:
                return self._read(next(self._call))
            except grpc.RpcError as error:
                if self._is_whole(error):
                    raise StopIteration from None
                self._closed.wait(self._pause_s(error))
            except StopIteration:
                self._assembly.check_end()
                raise
            self._check_open()
            self._cancel.detach()
            self._call = self._reopen(
                self._assembly.resumed, self._patience.num_attempts, self._patience.num_deaths
            )
            self._hold(self._call.cancel)
            if self._closed.is_set():  # by another thread, which had the call before to cancel
                self._cancel()

    def completion(self) -> Completion:
        """Reads the remaining pieces and returns the whole output. Raises PagewireError."""
        for _ in self:
            pass
        return self._assembly.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Output, AsyncIterator[Delta]):
    """Asynchronous iterator over the pieces of an output; otherwise like Stream."""

    def __init__(self, reopen: Reopen[AsyncStreamCall], plan: StreamCallPlan[Any]) -> None:
        call = reopen((), 0, 0)
        self._reopen = reopen
        super().__init__(call.cancel, plan)
        self._responses = aiter(call)

    async def __anext__(self) -> Delta:
        while True:
            try:
                return self._read(await anext(self._responses))
            except grpc.RpcError as error:
                if self._is_whole(error):
                    raise StopAsyncIteration from None
                await asyncio.sleep(self._pause_s(error))
            except StopAsyncIteration:
                self._assembly.check_end()
                raise
            except asyncio.CancelledError:
                self._check_open()
                raise  # the task was cancelled, not the stream
            self._check_open()
            self._cancel.detach()
            call = self._reopen(
                self._assembly.resumed, self._patience.num_attempts, self._patience.num_deaths
            )
            self._hold(call.cancel)
            self._responses = aiter(call)

    async def completion(self) -> Completion:
        """Reads the remaining pieces and returns the whole output. Raises PagewireError."""
        async for _ in self:
            pass
        return self._assembly.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
