"""Messages between a process and its checking process: four bytes of length, then the content."""

import socket
import struct

_LENGTH = struct.Struct("<I")
# The first byte of an answer about a grammar, before its problem in words.
FOLLOWED, BAD, TOO_LARGE, SLOW = b"0", b"1", b"2", b"3"
# What asks for a check, with its connection.
QUICK_CHECK, FULL_CHECK = b"q", b"f"


class Closed(Exception):
    """Raised when the other side has ended in the middle of a message, or before one."""


def send(connection: socket.socket, content: bytes) -> None:
    """Sends one message."""
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """Waits for one message. Raises Closed."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise Closed
        parts += part
    return bytes(parts)
