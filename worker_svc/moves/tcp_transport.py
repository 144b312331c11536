"""Blocks of other workers by TCP, with the certificates and the token of the services."""

import socket
import ssl
import time
import zlib
from collections import deque

import numpy as np

from wire.identity.access import watched_tokens
from wire.identity.options import IdentityOptions
from worker_svc.moves.staging import AT_ONCE, Staging, block_bytes
from worker_svc.moves.tcp_frames import (
    ANSWER,
    COUNT,
    HELLO_S,
    BadPeer,
    PartRead,
    PeerHello,
    read_welcome,
    send,
)
from worker_svc.moves.tcp_source import TcpSource
from worker_svc.moves.transport import (
    KvTransport,
    OwnKv,
    PeerSource,
    PullEnd,
    SourceRefused,
    Transfer,
    TransportOptions,
)
from worker_svc.protocol.step import IntColumn
from worker_svc.protocol.transfers import Peer

MOST_ASKED = 2  # requests at a time: the source reads blocks while those before are on their way


class TcpTransport(KvTransport):
    """A port of this worker, and connections to those of others.

    The handle is the port: the host is that of the address at which the scheduler reaches a worker.
    """

    def __init__(self, options: TransportOptions) -> None:
        self._identity = options.identity
        token = options.identity.peer_token_file
        self._tokens = None if token is None else watched_tokens(token)
        self._port = TcpSource(options)
        self._kv: OwnKv | None = None

    def expose(self, kv: OwnKv) -> bytes:
        self._kv = kv
        self._port.begin(kv)
        return str(self._port.port).encode()

    def connect(self, peer: Peer) -> PeerSource:
        assert self._kv is not None
        host, port = _place(peer)
        connection = socket.create_connection((host, port), HELLO_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._secured(connection, peer.server_name or host)
            self._greet(connection, peer, self._kv)
        except BaseException:
            connection.close()
            raise
        return _TcpPeer(connection, self._kv)

    def close(self) -> None:
        self._port.close()

    def _secured(self, plain: socket.socket, name: str) -> socket.socket:
        context = _client_context(self._identity)
        return plain if context is None else context.wrap_socket(plain, server_hostname=name)

    def _greet(self, connection: socket.socket, peer: Peer, kv: OwnKv) -> None:
        token = "" if self._tokens is None else f"Bearer {self._tokens.current()[0]}"
        hello = PeerHello(peer.incarnation, kv.layout_hash, token)
        send(connection, hello.encode(), HELLO_S)
        size, problem = read_welcome(connection, time.monotonic() + HELLO_S)
        if not problem and size != block_bytes(kv.cache):
            problem = f"its blocks have {size} bytes, those here {block_bytes(kv.cache)}"
        if problem:
            raise SourceRefused(problem)


def _place(peer: Peer) -> tuple[str, int]:
    """The host and the port of a worker. Raises BadPeer for a handle that is none."""
    host = peer.address.rpartition(":")[0].strip("[]")
    port = int(peer.handle) if peer.handle.isdigit() and len(peer.handle) <= 5 else 0
    if not host or not 0 < port < 65536:
        raise BadPeer(f"{peer.address!r} and the handle {peer.handle[:16]!r} name no port")
    return host, port


def _client_context(identity: IdentityOptions) -> ssl.SSLContext | None:
    """TLS of the files as they are now; None where the services talk in plaintext."""
    if identity.tls_ca is None:
        return None
    context = ssl.create_default_context(cafile=identity.tls_ca)
    if identity.tls_client_cert is not None:
        context.load_cert_chain(identity.tls_client_cert, identity.tls_client_key)
    return context


class _TcpPeer(PeerSource):
    """A connection to a worker; after a pull that was not whole it is closed."""

    def __init__(self, connection: socket.socket, kv: OwnKv) -> None:
        self._connection = connection
        self._staging = Staging(kv.cache, kv.device)
        self._block_bytes = block_bytes(kv.cache)

    def fetch(self, theirs: IntColumn, ours: IntColumn) -> Transfer:
        return _TcpPull(self._connection, self._staging, theirs, ours)

    def close(self) -> None:
        self._connection.close()


class _TcpPull(Transfer):
    """Asks for a few blocks at a time; each poll takes what has come."""

    def __init__(
        self, connection: socket.socket, staging: Staging, theirs: IntColumn, ours: IntColumn
    ) -> None:
        self._connection = connection
        self._staging = staging
        self._ours = ours
        self._requests = deque(
            np.array_split(theirs, range(AT_ONCE, len(theirs), AT_ONCE)),
        )
        self._asked: deque[int] = deque()  # blocks of each request that is not answered
        self._head = memoryview(bytearray(ANSWER.size))
        self._content: memoryview | None = None  # of an answer whose head has come
        self._reading: PartRead | None = None
        self._num_done = 0
        self._is_cancelled = False

    def poll(self) -> PullEnd | None:
        try:
            return self._go_on()
        except (BadPeer, OSError) as error:  # what came before is whole
            return PullEnd(self._num_done, f"{type(error).__name__}: {error}")

    def _go_on(self) -> PullEnd | None:
        if self._is_cancelled:
            return PullEnd(self._num_done, "it was cancelled")
        while self._requests and len(self._asked) < MOST_ASKED:
            blocks = self._requests.popleft()
            frame = COUNT.pack(len(blocks)) + blocks.astype("<i4").tobytes()
            send(self._connection, frame, HELLO_S)
            self._asked.append(len(blocks))
        if self._reading is None:
            self._reading = PartRead(self._connection, self._head)
        if not self._reading.go_on():
            return None
        if self._content is None:
            self._content = self._room()
            self._reading = PartRead(self._connection, self._content)
            return None
        self._take(self._content)
        self._reading = self._content = None
        return PullEnd(self._num_done) if self._num_done == len(self._ours) else None

    def _room(self) -> memoryview:
        """Memory for the answer whose head has come. Raises BadPeer."""
        told, _ = ANSWER.unpack(self._head)
        if told != self._asked[0]:
            raise BadPeer(f"it answers with {told} blocks where {self._asked[0]} were asked for")
        return self._staging.room(told)

    def _take(self, content: memoryview) -> None:
        """Writes the blocks of an answer. Raises BadPeer for other bytes than were sent."""
        count, crc = ANSWER.unpack(self._head)
        if zlib.crc32(content) != crc:
            raise BadPeer("what came is not what was sent")
        self._staging.write(self._ours[self._num_done : self._num_done + count])
        self._num_done += self._asked.popleft()

    def cancel(self) -> None:
        self._is_cancelled = True
