"""Length-prefixed messages over a stream socket between two ranks of one host."""

import socket
import struct

LENGTH = struct.Struct("<I")


class MessagePipe:
    """One end of the pipe; it owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = self._socket.makefile("rb")

    def send(self, message: bytes) -> None:
        """Sends a message; returns once the kernel has it. Raises OSError if the peer is gone."""
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Waits for a message and returns it. Raises EOFError if the peer is gone."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        found = self._reader.read(length)
        if len(found) < length:
            raise EOFError("the other rank has ended")
        return found
