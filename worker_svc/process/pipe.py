"""Whole messages over a stream socket, in order, between two ranks of one host."""

import socket
import struct

LENGTH = struct.Struct("<I")


class OrderPipe:
    """One end; it owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = self._socket.makefile("rb")

    def send(self, message: bytes) -> None:
        """Returns once the system has the message; raises OSError if the other end is gone."""
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Waits for a message. Raises EOFError if the other end is gone."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        found = self._reader.read(length)
        if len(found) < length:
            raise EOFError("the other rank has ended")
        return found
