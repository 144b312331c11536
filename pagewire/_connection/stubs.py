"""The stubs of a server's services over one channel, for threads and for asyncio."""

from functools import cached_property
from typing import TYPE_CHECKING

from pagewire._channel import AioOpener, Connection, open_channel
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


class AioStubs(AioOpener):
    """Stubs of the event loop in which the first of them is called."""

    @cached_property
    def inference(self) -> "InferenceServiceAsyncStub":
        return InferenceServiceStub(self.channel)

    @cached_property
    def embedding(self) -> "EmbeddingServiceAsyncStub":
        return EmbeddingServiceStub(self.channel)
