"""An event loop that hears of all finished gRPC operations at once.

grpc.aio (1.85) writes a byte to a socket for each operation that has ended, such as the write of a
message. Its reader handles all operations that have ended, but takes one byte: in a server with
many streams the loop then has a round for each byte, mostly with nothing to do. Here the bytes that
have come are taken together.
"""

import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_NO_COUNT = bytes(struct.calcsize("i"))
# Of a grpc that has none of this name, every reader stays as it is.
_QUEUE: Any = getattr(cygrpc, "PollerCompletionQueue", ())


class GrpcLoop(uvloop.Loop):
    """uvloop's loop, for processes whose gRPC servers stream to many."""

    # type: the arguments are those of the callback, which a signature cannot say here.
    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        if _is_of_grpc(callback):
            super().add_reader(fd, handle_all, fd, partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Any) -> bool:
    method = callback.func if isinstance(callback, partial) else callback
    return isinstance(getattr(method, "__self__", None), _QUEUE)


def handle_all(reader: socket.socket, handle: Callable[[], None]) -> None:
    """Takes all bytes but one, which `handle` takes.

    Each came after its operation was put into the queue that `handle` empties, so none is missed.
    """
    (num_bytes,) = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, _NO_COUNT))
    if num_bytes > 1:
        reader.recv(num_bytes - 1)
    handle()
