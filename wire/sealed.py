"""Numbers and checksums of the frames of one stream, so that none is lost, repeated or changed.

A sealed frame is a message that ends with two fields: its place in the stream, and the CRC-32 of
all bytes before the checksum. Every message type that is sealed declares both under the numbers
below, as its last ones, so a peer of an earlier version reads a sealed frame as it reads any other.
Either all frames of a stream are sealed or none is: then the other side does not know seals.
"""

import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar
from zlib import crc32

import grpc
from google.protobuf.message import DecodeError, Message

SEQUENCE_FIELD, CHECKSUM_FIELD = 14, 15
_FIXED32 = 5  # wire type
_SEQUENCE_KEY, _CHECKSUM_KEY = SEQUENCE_FIELD << 3 | _FIXED32, CHECKSUM_FIELD << 3 | _FIXED32
_FIELD = struct.Struct("<BI")  # key and value of either
_WRAP = 1 << 32
NO_MESSAGE = "the request is not a valid protobuf message of its type"

M = TypeVar("M", bound=Message)


class BadFrame(Exception):
    """Raised for a frame that is not the one that was sent next; the stream cannot go on."""


class Sealer:
    """Seals the frames of one direction of one stream, in the order in which they leave."""

    def __init__(self) -> None:
        self._num_sealed = 0

    def seal(self, frame: bytes) -> bytes:
        """The frame with its place and its checksum."""
        self._num_sealed = (self._num_sealed + 1) % _WRAP
        return sealed_at(self._num_sealed, frame)

    def seal_message(self, message: Message) -> bytes:
        """The message as a sealed frame; a serializer of gRPC's."""
        return self.seal(message.SerializeToString())


def sealed_at(place: int, frame: bytes) -> bytes:
    """The frame with a place in its stream and a checksum."""
    placed = frame + _FIELD.pack(_SEQUENCE_KEY, place)
    return placed + _FIELD.pack(_CHECKSUM_KEY, crc32(placed))


class SealCheck:
    """Checks the frames of one direction of one stream, in the order in which they come."""

    def __init__(self) -> None:
        self._num_checked = 0
        self._is_sealed = False  # known with the first frame

    @property
    def is_sealed(self) -> bool:
        """True if the other side seals its frames."""
        return self._is_sealed

    def check(self, frame: bytes) -> None:
        """Accepts the next frame. Raises BadFrame."""
        self._num_checked = (self._num_checked + 1) % _WRAP
        place, is_whole = _seal_of(frame)
        if place is not None and not is_whole:
            if self._is_sealed or self._num_checked == 1:
                raise BadFrame("a frame of the stream was changed on the way")
            place = None  # of a peer without seals: it ends like one by chance
        if place is None:
            if self._is_sealed:
                raise BadFrame(f"frame {self._num_checked} of the stream has no seal")
            return
        if not self._is_sealed and self._num_checked > 1:
            raise BadFrame(f"frame {self._num_checked} of the stream is the first with a seal")
        self._is_sealed = True
        if place != self._num_checked:
            raise BadFrame(f"frame {place} of the stream came, expected {self._num_checked}")


def _seal_of(frame: bytes) -> tuple[int | None, bool]:
    """The place that a seal names, None without a seal; and True if its checksum is the frame's."""
    at_sum = len(frame) - _FIELD.size
    at_place = at_sum - _FIELD.size
    if at_place < 0 or frame[at_sum] != _CHECKSUM_KEY or frame[at_place] != _SEQUENCE_KEY:
        return None, False
    _, told = _FIELD.unpack_from(frame, at_sum)
    return int(_FIELD.unpack_from(frame, at_place)[1]), crc32(memoryview(frame)[:at_sum]) == told


def as_frame(frame: bytes) -> bytes:
    """A frame as it came; a deserializer of gRPC's for frames that a SealCheck reads."""
    return frame


def sealed_call(
    channel: grpc.aio.Channel,
    method: str,
    sealer: Sealer,
    messages: AsyncIterator[Message] | None = None,
) -> Any:
    """A call of a method with streams in both directions: messages go out sealed, frames come.

    The messages are those given, or else those that are written.
    """
    make = channel.stream_stream(
        method,
        request_serializer=sealer.seal_message,
        response_deserializer=as_frame,
        _registered_method=True,  # type: ignore[call-arg]
    )
    return make() if messages is None else make(messages)


def sealing(
    behaviour: Callable[[AsyncIterator[M], Any], AsyncGenerator[Message, None]],
    read: Callable[[bytes], M],
) -> Any:
    """A handler of frames for one of messages; `read` is the FromString of its requests.

    Its requests raise BadFrame for a frame that is not the next one.
    """

    async def requests(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[M]:
        check = SealCheck()
        async for frame in frames:
            check.check(frame)
            try:
                message = read(frame)
            except DecodeError:  # its text says nothing that the caller could use
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
            yield message

    async def serve(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        sealer = Sealer()
        responses = behaviour(requests(frames, context), context)
        try:
            async for response in responses:
                yield sealer.seal_message(response)
        finally:
            await responses.aclose()

    return grpc.stream_stream_rpc_method_handler(serve)
