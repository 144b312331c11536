"""The stubs of a server's services over one channel, for threads and for asyncio."""

from functools import cached_property
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from pagewire._channel import Connection, open_aio_channel, open_channel
from pagewire.v1.embedding_pb2_grpc import EmbeddingServiceStub
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:  # names that only the typing stubs define
    from pagewire.v1.embedding_pb2_grpc import EmbeddingServiceAsyncStub
    from pagewire.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class Stubs:
    """Stubs whose calls block; may be shared between threads."""

    def __init__(self, connection: Connection) -> None:
        self._channel = open_channel(connection)
        self.inference = InferenceServiceStub(self._channel)
        self.embedding = EmbeddingServiceStub(self._channel)

    def close(self) -> None:
        """Cancels every call and closes the connection."""
        self._channel.close()


class AioStubs:
    """Stubs of the event loop in which the first of them is called."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opened: grpc.aio.Channel | None = None

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # An asyncio channel belongs to the loop that opens it, hence not in __init__.
        self._opened = open_aio_channel(self._connection)
        return self._opened

    @cached_property
    def inference(self) -> "InferenceServiceAsyncStub":
        return InferenceServiceStub(self._channel)

    @cached_property
    def embedding(self) -> "EmbeddingServiceAsyncStub":
        return EmbeddingServiceStub(self._channel)

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        if self._opened is not None:
            await self._opened.close()
