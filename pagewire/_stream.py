"""Outputs that arrive piece by piece, for threads and for asyncio. Leaving one cancels its call.

A stream that breaks because the gateway or the way there is gone is opened again behind the tokens
that have come, so its reader sees a pause.
"""

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from pagewire._answers import Assembly
from pagewire._errors import Cancelled, from_rpc_error
from pagewire._resume import Patience, Reopen
from pagewire._types import Completion, Delta
from pagewire.v1 import inference_pb2 as pb

_Response = pb.GenerateStreamResponse | pb.ChatStreamResponse


class _Output:
    """What both kinds of stream know: what has come so far, and how to stop the rest."""

    def __init__(
        self, cancel: Callable[[], bool], target: str, patience: Patience, num_outputs: int
    ) -> None:
        self._target = target
        self._patience = patience
        self._assembly = Assembly(num_outputs)
        self._is_closed = False
        self._hold(cancel)

    def _hold(self, cancel: Callable[[], bool]) -> None:
        """Has this call cancelled when the stream is left."""
        self._cancel = weakref.finalize(self, cancel)
        self._cancel.atexit = False

    def _read(self, response: _Response) -> Delta:
        self._patience.note()
        return self._assembly.read(response)

    def _pause_s(self, error: grpc.RpcError) -> float:
        """How long to wait before the stream is opened again; raises what cannot be sat out."""
        pause_s = None
        if not (self._is_closed or self._assembly.is_finished):
            pause_s = self._patience.pause_s(error)
        if pause_s is None:
            raise from_rpc_error(error, self._target) from None
        return pause_s

    @property
    def request_id(self) -> str:
        """The request's id, known from the first piece on."""
        return self._assembly.request_id

    @property
    def text(self) -> str:
        """The text so far, of the first output."""
        return self._assembly.text

    def close(self) -> None:
        """Stops the request, if it still runs."""
        self._is_closed = True
        self._cancel()


class Call(Protocol):
    """What is used of a gRPC stream."""

    def __next__(self) -> _Response: ...
    def cancel(self) -> bool: ...


class AioCall(Protocol):
    """What is used of an asyncio gRPC stream."""

    def __aiter__(self) -> AsyncIterator[_Response]: ...
    def cancel(self) -> bool: ...


class Stream(_Output, Iterator[Delta]):
    """The pieces of an output as they come; of several, each with the index of its output.

    Leaving early stops the work on the server: `close()`, the end of a `with` block, and dropping
    the last reference all cancel the call.
    """

    def __init__(
        self, reopen: Reopen[Call], target: str, patience: Patience, num_outputs: int
    ) -> None:
        self._call = reopen((), 0)
        self._reopen = reopen
        super().__init__(self._call.cancel, target, patience, num_outputs)

    def __next__(self) -> Delta:
        while True:
            try:
                return self._read(next(self._call))
            except grpc.RpcError as error:
                time.sleep(self._pause_s(error))
            except StopIteration:
                self._assembly.completion()  # an end without a reason is an error
                raise
            self._cancel.detach()
            self._call = self._reopen(self._assembly.token_ids, self._patience.num_attempts)
            self._hold(self._call.cancel)

    def completion(self) -> Completion:
        """Reads what is left and returns the whole output."""
        for _ in self:
            pass
        return self._assembly.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream(_Output, AsyncIterator[Delta]):
    """The pieces of one output as they come; leaving early does what it does to a Stream."""

    def __init__(
        self, reopen: Reopen[AioCall], target: str, patience: Patience, num_outputs: int
    ) -> None:
        call = reopen((), 0)
        self._reopen = reopen
        super().__init__(call.cancel, target, patience, num_outputs)
        self._responses = aiter(call)

    async def __anext__(self) -> Delta:
        while True:
            try:
                return self._read(await anext(self._responses))
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause_s(error))
            except StopAsyncIteration:
                self._assembly.completion()  # an end without a reason is an error
                raise
            except asyncio.CancelledError:
                if self._cancel.alive:
                    raise  # the task was cancelled, not the stream
                raise Cancelled("the stream was closed", code="CANCELLED") from None
            self._cancel.detach()
            call = self._reopen(self._assembly.token_ids, self._patience.num_attempts)
            self._hold(call.cancel)
            self._responses = aiter(call)

    async def completion(self) -> Completion:
        """Reads what is left and returns the whole output."""
        async for _ in self:
            pass
        return self._assembly.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
