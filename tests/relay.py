"""A relay between two services that loses, repeats, swaps and changes frames."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

Meddle = Callable[[str, int, bytes], list[bytes]]
UP, DOWN = "up", "down"


@asynccontextmanager
async def frame_relay(target: str, meddle: Meddle) -> AsyncIterator[int]:
    """Relays gRPC calls to an address and yields its port; frames of streams go through `meddle`.

    It gets the direction, the frame's number in its direction over all streams, and the frame, and
    returns what to pass on.
    """
    numbers = {UP: 0, DOWN: 0}

    def meddled(direction: str, frame: bytes) -> list[bytes]:
        numbers[direction] += 1
        return meddle(direction, numbers[direction], frame)

    async with grpc.aio.insecure_channel(target) as channel:

        class Handlers(grpc.GenericRpcHandler):
            def service(self, handler_call_details: Any) -> Any:
                method = handler_call_details.method
                if method.endswith(("/Session", "/Attach")):
                    stream = partial(_stream, channel, method, meddled)
                    return grpc.stream_stream_rpc_method_handler(stream)
                return grpc.unary_unary_rpc_method_handler(partial(_unary, channel, method))

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(None)


async def _unary(channel: grpc.aio.Channel, method: str, request: bytes, context: Any) -> Any:
    try:
        return await channel.unary_unary(method)(request)
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), error.details() or "")


async def _stream(
    channel: grpc.aio.Channel,
    method: str,
    meddled: Callable[[str, bytes], list[bytes]],
    frames: AsyncIterator[bytes],
    context: Any,
) -> AsyncIterator[bytes]:
    async def upwards() -> AsyncIterator[bytes]:
        async for frame in frames:
            for passed in meddled(UP, frame):
                yield passed

    call = channel.stream_stream(method)(upwards())
    try:
        async for frame in call:
            for passed in meddled(DOWN, frame):
                yield passed
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), error.details() or "")
    finally:
        call.cancel()


class OnePlace:
    """Does one thing to the frames at a place of one direction, or to each frame at all places."""

    def __init__(self, direction: str, number: int, what: str) -> None:
        self._direction, self._number, self._what = direction, number, what
        self._kept: bytes | None = None
        self.num_done = 0

    def __call__(self, direction: str, number: int, frame: bytes) -> list[bytes]:
        if direction != self._direction:
            return [frame]
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return [frame, kept]
        if number != self._number:
            return [frame]
        self.num_done += 1
        match self._what:
            case "lose":
                return []
            case "repeat":
                return [frame, frame]
            case "swap":
                self._kept = frame
                return []
            case _:
                assert self._what == "flip"
                at = len(frame) // 3
                return [frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]]
