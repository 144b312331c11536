"""Frames of the transport tcp, little-endian. A connection is one receiver's, and it asks:

    receiver  hello    "pagewkv1", u64 incarnation, 32 bytes of layout hash, text: authorization
    source    welcome  "pagewkv1", u64 bytes per block, text: a problem, after which it closes
    receiver  request  u32 n from 1 to AT_ONCE, n times i32 block
    source    answer   u32 n, u32 CRC-32 of what follows, n whole blocks

A text is a u16 n and n bytes.

The receiver may send a second request before the first is answered. Each length is checked against
its limit before anything is read by it, and each side waits for the other for a bounded time.
"""

import socket
import struct
import time
from dataclasses import dataclass

MAGIC = b"pagewkv1"
HELLO = struct.Struct("<8sQ32sH")
WELCOME = struct.Struct("<8sQH")
COUNT = struct.Struct("<I")
ANSWER = struct.Struct("<II")
MOST_AUTHORIZATION = 4096  # bytes
MOST_PROBLEM = 1000
HELLO_S = 10.0  # until a hello, or its answer, is complete
SILENCE_S = 30.0  # of the other side, in the middle of a frame
LOOK_S = 0.1  # the longest that one look for bytes waits


class BadPeer(Exception):
    """Raised for bytes that are no frame of this protocol; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class PeerHello:
    """The one that asks, and the worker whose blocks it asks for."""

    incarnation: int
    layout_hash: bytes
    authorization: str

    def encode(self) -> bytes:
        """The frame."""
        told = self.authorization.encode()
        return HELLO.pack(MAGIC, self.incarnation, self.layout_hash, len(told)) + told


def read_hello(connection: socket.socket, end_s: float) -> PeerHello:
    """Reads a hello until `end_s`. Raises BadPeer, OSError."""
    head = memoryview(bytearray(HELLO.size))
    read_into(connection, head, end_s)
    magic, incarnation, layout_hash, length = HELLO.unpack(head)
    if magic != MAGIC:
        raise BadPeer("it does not begin with a hello")
    if length > MOST_AUTHORIZATION:
        raise BadPeer(f"an authorization of {length} bytes, {MOST_AUTHORIZATION} are the most")
    told = memoryview(bytearray(length))
    read_into(connection, told, end_s)
    return PeerHello(incarnation, layout_hash, bytes(told).decode(errors="replace"))


def encode_welcome(block_bytes: int, problem: str = "") -> bytes:
    """The answer to a hello."""
    told = problem.encode()[:MOST_PROBLEM]
    return WELCOME.pack(MAGIC, block_bytes, len(told)) + told


def read_welcome(connection: socket.socket, end_s: float) -> tuple[int, str]:
    """Reads the answer to a hello: bytes per block, and a problem. Raises BadPeer, OSError."""
    head = memoryview(bytearray(WELCOME.size))
    read_into(connection, head, end_s)
    magic, block_bytes, length = WELCOME.unpack(head)
    if magic != MAGIC or length > MOST_PROBLEM:
        raise BadPeer("what listens there is no worker's port for blocks")
    told = memoryview(bytearray(length))
    read_into(connection, told, end_s)
    return block_bytes, bytes(told).decode(errors="replace")


class PartRead:
    """A buffer that is filled from a connection, a part at a time. Its clock is time.monotonic."""

    def __init__(
        self, connection: socket.socket, into: memoryview, end_s: float | None = None
    ) -> None:
        """It has until `end_s`, or without it until the other side is silent for too long."""
        self._connection = connection
        self._into = into
        self._end_s = end_s
        self._num_read = 0
        self._heard_s = time.monotonic()

    def go_on(self) -> bool:
        """Waits a short time for bytes; True once the buffer is full.

        Raises TimeoutError when its time is up, ConnectionError at the end of the stream.
        """
        if self._num_read == len(self._into):
            return True
        self._connection.settimeout(LOOK_S)
        try:
            num_new = self._connection.recv_into(self._into[self._num_read :])
        except TimeoutError:
            num_new = -1
        if num_new == 0:
            raise ConnectionError("the connection was closed")
        now_s = time.monotonic()
        if num_new > 0:
            self._num_read, self._heard_s = self._num_read + num_new, now_s
        if now_s > (self._heard_s + SILENCE_S if self._end_s is None else self._end_s):
            raise TimeoutError(f"{self._num_read} of {len(self._into)} bytes came in time")
        return self._num_read == len(self._into)


def read_into(connection: socket.socket, into: memoryview, end_s: float) -> None:
    """Fills a buffer until `end_s`. Raises TimeoutError, ConnectionError, OSError."""
    reading = PartRead(connection, into, end_s)
    while not reading.go_on():
        pass


def send(connection: socket.socket, frame: bytes | memoryview, timeout_s: float) -> None:
    """Sends a frame. Raises TimeoutError, OSError."""
    connection.settimeout(timeout_s)
    connection.sendall(frame)
