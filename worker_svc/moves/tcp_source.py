"""The port at which other workers read blocks of this one, by the transport tcp.

Each connection has a thread. It sends what it is asked for: what may be read, the scheduler
decides, which holds these blocks until the receiver's answer. Who is no peer gets nothing, and
holds a thread for a short time only.
"""

import logging
import socket
import ssl
import threading
import time
import zlib
from contextlib import ExitStack, suppress

import numpy as np

from wire.identity.access import AccessDenied, require
from wire.identity.certificates import certificates_of
from wire.identity.roles import Role
from wire.server import PortInUse
from worker_svc.moves.staging import AT_ONCE, Staging, block_bytes
from worker_svc.moves.tcp_frames import (
    ANSWER,
    COUNT,
    HELLO_S,
    SILENCE_S,
    BadPeer,
    PeerHello,
    encode_welcome,
    read_hello,
    read_into,
    send,
)
from worker_svc.moves.transport import OwnKv, TransportOptions
from worker_svc.process.pending_hellos import PendingHellos
from worker_svc.protocol.step import IntColumn

MOST_CONNECTIONS = 64  # of peers; one more is refused, and its scheduler computes
IDLE_S = 600.0  # between two requests

log = logging.getLogger(__name__)


class TcpSource:
    """Listens from the start, and serves once there is a cache."""

    def __init__(self, options: TransportOptions) -> None:
        """Raises PortInUse, BadIdentityFile."""
        self._access = options.identity.peer_access()
        self._certificates = certificates_of(options.identity)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        address = options.host.strip("[]"), options.port
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise PortInUse(f"--kv-port: {options.host}:{options.port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._pending = PendingHellos()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # of peers
        self._is_closed = False
        self._kv: OwnKv | None = None

    def begin(self, kv: OwnKv) -> None:
        """Serves a cache from now on."""
        self._kv = kv
        threading.Thread(target=self._accept, name="kv-port", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                _end(connection)
        _end(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # as where no file descriptor is left
                if not self._is_closed:
                    log.warning("--kv-port: %s", error)
                    time.sleep(1.0)
                continue
            thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
            thread.name = "kv-peer"
            thread.start()

    def _run(self, plain: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(plain.close)
            try:
                connection = self._secured(plain)
                stack.callback(connection.close)
                hello = self._greeted(connection)
                stack.callback(self._forget, connection)
                self._admit(connection, hello)
                self._serve(connection)
            except (BadPeer, OSError, AccessDenied) as error:
                log.info("a connection to --kv-port ends: %s", error)
            except Exception:
                log.exception("a connection to --kv-port ends")

    def _secured(self, plain: socket.socket) -> socket.socket:
        """The connection, whose handshake is still to come where there is TLS."""
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(HELLO_S)
        if self._certificates is None:
            return plain
        context = self._certificates.ssl_context()
        return context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)

    def _greeted(self, connection: socket.socket) -> PeerHello:
        """Reads the hello of a peer. Raises AccessDenied for anybody else."""
        hurry = threading.Timer(HELLO_S, _end, (connection,))  # each byte may be late
        hurry.daemon = True
        hurry.start()
        try:
            with self._pending.waiting(lambda: _end(connection)):
                if isinstance(connection, ssl.SSLSocket):
                    connection.do_handshake()
                hello = read_hello(connection, time.monotonic() + HELLO_S)
        finally:
            hurry.cancel()
        if self._access is not None:
            require(self._access.identify(hello.authorization or None), Role.PEER, "a peer")
        return hello

    def _admit(self, connection: socket.socket, hello: PeerHello) -> None:
        """Answers a hello. Raises BadPeer after a refusal."""
        kv = self._cache
        problem = ""
        if hello.incarnation != kv.incarnation:
            problem = f"this is worker {kv.incarnation}, not {hello.incarnation}"
        elif hello.layout_hash != kv.layout_hash:
            theirs, ours = hello.layout_hash.hex()[:16], kv.layout_hash.hex()[:16]
            problem = f"its blocks have layout {ours}, those of the other {theirs}"
        with self._lock:
            if self._is_closed or len(self._open) >= MOST_CONNECTIONS:
                problem = problem or f"it serves {len(self._open)} connections already"
            if not problem:
                self._open.add(connection)
        send(connection, encode_welcome(block_bytes(kv.cache), problem), HELLO_S)
        if problem:
            raise BadPeer(problem)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    @property
    def _cache(self) -> OwnKv:
        assert self._kv is not None  # set before a connection is accepted
        return self._kv

    def _serve(self, connection: socket.socket) -> None:
        """Answers requests until the peer closes the connection."""
        staging = Staging(self._cache.cache, self._cache.device)
        while (asked := self._request(connection)) is not None:
            content = staging.read(asked)
            head = ANSWER.pack(len(asked), zlib.crc32(content))
            send(connection, head, SILENCE_S)
            send(connection, content, SILENCE_S)

    def _request(self, connection: socket.socket) -> IntColumn | None:
        """The blocks of the next request; None at the end."""
        head = memoryview(bytearray(COUNT.size))
        try:
            read_into(connection, head, time.monotonic() + IDLE_S)
        except ConnectionError:
            return None
        (count,) = COUNT.unpack(head)
        if not 1 <= count <= AT_ONCE:
            raise BadPeer(f"it asks for {count} blocks at once, 1 to {AT_ONCE} may be")
        column = memoryview(bytearray(4 * count))
        read_into(connection, column, time.monotonic() + HELLO_S)
        asked = np.frombuffer(column, dtype="<i4").astype(np.int64)
        outside = (asked < 1) | (asked >= self._cache.cache.num_blocks)
        if outside.any():
            raise BadPeer(f"block {asked[outside.argmax()]} is not in this cache")
        return asked


def _end(connection: socket.socket) -> None:
    """Has the thread that reads or writes a connection see its end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
