"""What may lie between two services: a relay of bytes that resets, cuts and stalls, and one of
frames that loses, repeats, swaps and changes them."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import grpc

Meddle = Callable[[str, int, bytes], list[bytes]]
UP, DOWN = "up", "down"
_CHUNK = 16 << 10


class ByteRelay:
    """Relays TCP connections to a port; each can be reset, cut in the middle, or stopped."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.num_resets = 0  # of connections
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._cuts_next = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Resets all connections."""
        self.num_resets += len(self._open) // 2
        for writer in self._open:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._open.clear()

    def cut(self) -> None:
        """Resets all connections once one of them has passed on half of what comes next."""
        self._cuts_next = True

    def stall(self) -> None:
        """Passes nothing on until `go_on`; connections stay open, and new ones are accepted."""
        self._may_pass.clear()

    def go_on(self) -> None:
        """Passes on what has come meanwhile."""
        self._may_pass.set()

    async def _connected(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        for reader, other in ((near, far_writer), (far, writer)):
            task = asyncio.create_task(self._pass_on(reader, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                await self._may_pass.wait()
                if self._cuts_next and len(data) > 1:
                    self._cuts_next = False
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    self.reset()
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.close()


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
