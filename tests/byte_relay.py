"""A relay of TCP connections that resets them, cuts them in the middle of a frame, and stalls."""

import asyncio
import contextlib
import socket
import struct
from typing import Self

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
