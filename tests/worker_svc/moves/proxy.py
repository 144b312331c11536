"""A proxy in front of a port: it hands on bytes until a test tells it otherwise."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Proxy:
    """Each connection goes through `alter`, which may change, hold back or drop what comes down."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.alter: Callable[[bytes, int], bytes | None] = lambda data, _: data  # None: it is cut
        self.num_connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += client, server
                for pair, alters in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._pump, args=(*pair, alters), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, alters: bool) -> None:
        num_before = 0
        with suppress(OSError):
            while data := source.recv(4096):
                given = self.alter(data, num_before) if alters else data
                if given is None:
                    break
                num_before += len(data)
                target.sendall(given)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Ends the connections that there are."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._sockets):
            one.close()
