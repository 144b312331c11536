"""Outputs that arrive piece by piece, for threads and for asyncio. Leaving one cancels its call."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from pagewire import _convert
from pagewire._errors import Cancelled, from_rpc_error
from pagewire._types import Completion, Delta
from pagewire.v1 import inference_pb2 as pb

_Response = pb.GenerateStreamResponse | pb.ChatStreamResponse


class _Output:
    """What both kinds of stream know: what has come so far, and how to stop the rest."""

    def __init__(self, cancel: Callable[[], bool], target: str) -> None:
        self._target = target
        self._assembly = _convert.Assembly()
        self._cancel = weakref.finalize(self, cancel)
        self._cancel.atexit = False

    @property
    def request_id(self) -> str:
        """The request's id, known from the first piece on."""
        return self._assembly.request_id

    @property
    def text(self) -> str:
        """The text so far."""
        return self._assembly.text

    def close(self) -> None:
        """Stops the request, if it still runs."""
        self._cancel()


class _Call(Protocol):
    """What is used of a gRPC stream."""

    def __next__(self) -> _Response: ...
    def cancel(self) -> bool: ...


class _AioCall(Protocol):
    """What is used of an asyncio gRPC stream."""

    def __aiter__(self) -> AsyncIterator[_Response]: ...
    def cancel(self) -> bool: ...


class Stream(_Output, Iterator[Delta]):
    """The pieces of one output as they come.

    Leaving early stops the work on the server: `close()`, the end of a `with` block, and dropping
    the last reference all cancel the call.
    """

    def __init__(self, call: _Call, target: str) -> None:
        super().__init__(call.cancel, target)
        self._call = call

    def __next__(self) -> Delta:
        try:
            return self._assembly.read(next(self._call))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from None
        except StopIteration:
            self._assembly.completion()  # an end without a reason is an error
            raise

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

    def __init__(self, call: _AioCall, target: str) -> None:
        super().__init__(call.cancel, target)
        self._responses = aiter(call)

    async def __anext__(self) -> Delta:
        try:
            return self._assembly.read(await anext(self._responses))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from None
        except StopAsyncIteration:
            self._assembly.completion()  # an end without a reason is an error
            raise
        except asyncio.CancelledError:
            if self._cancel.alive:
                raise  # the task was cancelled, not the stream
            raise Cancelled("the stream was closed", code="CANCELLED") from None

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
