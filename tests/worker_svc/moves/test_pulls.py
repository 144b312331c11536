"""Pulls of blocks: what comes is whole, what does not is told, and no other pull is harmed."""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagewire.cli.launcher.certificates import MadeCertificates
from tests.pace import paced, patience
from tests.wire.identity.conftest import authorities  # noqa: F401 - a fixture
from tests.worker_svc.moves.proxy import Proxy
from tests.worker_svc.moves.pulls import End
from wire.identity.options import IdentityOptions
from worker_svc.moves import tcp_frames, tcp_source
from worker_svc.moves.staging import AT_ONCE
from worker_svc.moves.transport import (
    KvTransport,
    PeerSource,
    PullEnd,
    Transfer,
    TransportOptions,
    UnknownTransport,
    open_transport,
)

MANY = list(range(1, 3 * AT_ONCE + 1))
Ends = Callable[..., End]


@pytest.fixture
def made() -> Iterator[Ends]:
    """Makes ends of transports, and closes them after the test."""
    with ExitStack() as stack:

        def make(name: str = "tcp", **fields: object) -> End:
            end = End(name, **fields)  # type: ignore[arg-type]
            stack.callback(end.close)
            return end

        yield make


@pytest.fixture(params=["tcp", "copy"])
def pair(request: pytest.FixtureRequest, made: Ends) -> tuple[End, End]:
    """A source, whose blocks hold their numbers, and a receiver."""
    source, receiver = made(request.param, num_blocks=100), made(request.param, incarnation=7)
    source.fill()
    return source, receiver


def test_blocks_come_whole_and_in_order_into_the_blocks_that_were_named(
    pair: tuple[End, End],
) -> None:
    source, receiver = pair
    theirs = [99, *MANY[:-1]]  # more than the receiver has
    done = receiver.pull(source.peer(), theirs, MANY[::-1])
    assert (done.num_blocks, done.problem) == (len(MANY), "")
    assert done.num_bytes == len(MANY) * 2 * 4 * 2 * 8 * 4
    assert receiver.contents(MANY[::-1]) == theirs
    assert receiver.contents([0, 50, 63]) == [0, 0, 0], "another block was written"


def test_both_pull_from_each_other_at_once(pair: tuple[End, End]) -> None:
    source, receiver = pair
    receiver.fill()
    receiver.submit(1, source.peer(), MANY[:5], MANY[5:10])
    source.submit(1, receiver.peer(), MANY[:5], MANY[10:15])
    receiver.wait()
    source.wait()
    assert receiver.contents(MANY[5:10]) == source.contents(MANY[10:15]) == MANY[:5]


def test_another_incarnation_is_refused_by_the_source(pair: tuple[End, End]) -> None:
    source, receiver = pair
    done = receiver.pull(source.peer(incarnation=source.incarnation - 1), [1], [1])
    assert done.num_blocks == 0 and str(source.incarnation - 1) in done.problem
    assert receiver.contents([1]) == [0]


def test_another_layout_is_refused_by_the_source(made: Ends) -> None:
    for name in ("tcp", "copy"):
        source, receiver = made(name), made(name, model="another model")
        done = receiver.pull(source.peer(), [1], [1])
        assert done.num_blocks == 0 and "have" in done.problem and "layout" in done.problem


@pytest.mark.parametrize("block", [0, 100, 2**31 - 1])
def test_a_block_that_the_source_has_not_ends_the_pull_and_nothing_else(
    pair: tuple[End, End], block: int
) -> None:
    source, receiver = pair
    assert receiver.pull(source.peer(), [1, block], [1, 2]).num_blocks == 0
    assert receiver.pull(source.peer(), [1, 2], [1, 2]).num_blocks == 2


def test_a_transport_or_handle_that_is_unknown_is_an_answer(made: Ends) -> None:
    source, receiver = made(), made()
    for fields in ({"transport": "smoke"}, {"handle": b"no port"}, {"handle": b"0"}):
        done = receiver.pull(source.peer(**fields), [1], [1])
        assert done.num_blocks == 0 and done.problem
    assert receiver.pull(source.peer(), [1], [1]).num_blocks == 1


def test_a_peer_that_is_gone_is_an_answer_and_delays_no_other(made: Ends) -> None:
    source, receiver = made(), made()
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never says a word
    silent_peer = source.peer(handle=str(silent.getsockname()[1]).encode())
    receiver.submit(1, silent_peer, [1], [1])
    receiver.submit(2, source.peer(), [1], [2])
    end_s = time.monotonic() + patience(30)
    while 2 not in receiver.answers and time.monotonic() < end_s:
        time.sleep(0.01)
    assert receiver.answers[2].num_blocks == 1 and 1 not in receiver.answers
    silent.close()
    source.close()
    receiver.wait()
    assert receiver.answers[1].num_blocks == 0
    assert receiver.pull(source.peer(handle=b"1"), [1], [3]).num_blocks == 0


# --- connections that do not hold ----------------------------------------------------------------


@pytest.fixture
def proxied(made: Ends) -> Iterator[tuple[End, End, Proxy]]:
    source, receiver = made(), made()
    source.fill()
    proxy = Proxy(int(source.handle))
    source.handle = str(proxy.port).encode()
    yield source, receiver, proxy
    proxy.close()


def test_a_connection_that_breaks_keeps_whole_blocks_and_the_next_pull_connects_anew(
    proxied: tuple[End, End, Proxy],
) -> None:
    source, receiver, proxy = proxied
    block_bytes = 2 * 4 * 2 * 8 * 4
    limit = (AT_ONCE + 3) * block_bytes  # in the middle of the second answer
    proxy.alter = lambda data, before: data[: max(limit - before, 0)] or None
    done = receiver.pull(source.peer(), MANY, MANY)
    assert done.num_blocks == AT_ONCE and "Connection" in done.problem
    assert receiver.contents(MANY[:AT_ONCE]) == MANY[:AT_ONCE]
    proxy.alter = lambda data, _: data
    assert receiver.pull(source.peer(), MANY, MANY).num_blocks == len(MANY)
    assert receiver.contents(MANY) == MANY


def test_a_connection_that_broke_while_it_was_idle_costs_no_answer(
    proxied: tuple[End, End, Proxy],
) -> None:
    source, receiver, proxy = proxied
    assert receiver.pull(source.peer(), MANY[:2], MANY[:2]).num_blocks == 2
    proxy.cut()
    assert receiver.pull(source.peer(), MANY[2:5], MANY[2:5]).num_blocks == 3
    assert proxy.num_connections == 2 and receiver.contents(MANY[:5]) == MANY[:5]


def test_bytes_that_change_on_the_way_are_never_written(proxied: tuple[End, End, Proxy]) -> None:
    source, receiver, proxy = proxied

    def flip(data: bytes, before: int) -> bytes:
        place = 2000 - before  # in the first answer's blocks
        if 0 <= place < len(data):
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    proxy.alter = flip
    done = receiver.pull(source.peer(), MANY, MANY)
    assert done.num_blocks == 0 and "not what was sent" in done.problem
    assert receiver.contents(MANY) == [0] * len(MANY)


def test_a_cancel_ends_a_pull_that_hangs(proxied: tuple[End, End, Proxy]) -> None:
    source, receiver, proxy = proxied
    gate, held = threading.Event(), threading.Event()

    def hold(data: bytes, before: int) -> bytes:
        if before > 2000:
            held.set()
            gate.wait(patience(30))
        return data

    proxy.alter = hold
    receiver.submit(1, source.peer(), MANY, MANY)
    assert held.wait(patience(10))
    receiver.fetches.cancel((1, 99))
    receiver.wait()
    assert receiver.answers[1].problem == "it was cancelled"
    gate.set()
    assert receiver.contents(MANY[AT_ONCE:]) == [0] * (2 * AT_ONCE)
    proxy.alter = lambda data, _: data
    assert receiver.pull(source.peer(), MANY, MANY).num_blocks == len(MANY)
    assert receiver.contents(MANY) == MANY, "a late answer was taken for another"


def test_the_end_of_a_stream_waits_for_its_pulls(proxied: tuple[End, End, Proxy]) -> None:
    source, receiver, proxy = proxied
    gate, greeted = threading.Event(), threading.Event()
    proxy.alter = lambda data, _: data if gate.wait(patience(30)) else None
    receiver.submit(1, source.peer(), [1], [1])
    receiver.fetches.when_done(greeted.set)
    assert not greeted.is_set(), "a block is still written"
    gate.set()
    assert greeted.wait(patience(10)) and receiver.answers[1].num_blocks == 1


# --- who comes to the port -----------------------------------------------------------------------


def connect(end: End) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", int(end.handle)), patience(10))
    found.settimeout(patience(10))
    return found


def hello_of(end: End) -> bytes:
    layout = tcp_frames.PeerHello(end.incarnation, end_layout(end), "")
    return layout.encode()


def end_layout(end: End) -> bytes:
    from worker_svc.moves.layout import layout_hash  # noqa: PLC0415

    return layout_hash(end.cache, end.model, 0, 1)


def is_closed(connection: socket.socket) -> bool:
    """True once the other side has closed, whatever it said before."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" * 3,
        bytes(200),
        secrets.token_bytes(4096),
        tcp_frames.HELLO.pack(tcp_frames.MAGIC, 2**64 - 1, b"\xff" * 32, 2**16 - 1),
        tcp_frames.HELLO.pack(tcp_frames.MAGIC, 2**63, bytes(32), 0),
    ],
)
def test_garbage_is_no_hello(made: Ends, data: bytes) -> None:
    source, receiver = made(), made()
    with connect(source) as hostile:
        hostile.sendall(data)
        assert is_closed(hostile)
    assert receiver.pull(source.peer(), [1], [1]).num_blocks == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 0),
        struct.pack("<I", AT_ONCE + 1),
        struct.pack("<Ii", 1, -1),
        struct.pack("<Ii", 1, 2**31 - 1),
        struct.pack("<Ii", 1, 0),
    ],
)
def test_a_request_with_a_number_out_of_range_ends_its_connection(
    made: Ends, request_bytes: bytes
) -> None:
    source, receiver = made(), made()
    with connect(source) as hostile:
        hostile.sendall(hello_of(source))
        assert hostile.recv(tcp_frames.WELCOME.size).startswith(tcp_frames.MAGIC)
        hostile.sendall(request_bytes)
        assert is_closed(hostile)
    assert receiver.pull(source.peer(), [1], [1]).num_blocks == 1


def test_callers_that_say_nothing_make_room_for_peers(
    made: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred silent ones, and one that sends its hello byte by byte."""
    source, receiver = made(), made()
    silent = [connect(source) for _ in range(200)]
    assert receiver.pull(source.peer(), [1], [1]).num_blocks == 1
    assert all(map(is_closed, silent[:150])), "the oldest make room"
    for one in silent:
        one.close()
    monkeypatch.setattr(tcp_source, "HELLO_S", paced(0.3))
    with connect(source) as slow, pytest.raises(OSError):
        for byte in hello_of(source) * 1000:
            slow.sendall(bytes([byte]))
            time.sleep(paced(0.02))
            slow.setblocking(False)
            try:
                assert slow.recv(1), "it was closed"
            except BlockingIOError:
                slow.setblocking(True)
            except AssertionError:
                raise OSError("closed") from None
    assert receiver.pull(source.peer(), [1], [2]).num_blocks == 1


def test_connections_beyond_the_most_are_refused_in_words(
    made: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "MOST_CONNECTIONS", 1)
    source, first, second = made(), made(), made()
    assert first.pull(source.peer(), [1], [1]).num_blocks == 1
    refused = second.pull(source.peer(), [1], [1])
    assert refused.num_blocks == 0 and "1 connections already" in refused.problem
    first.fetches._lanes[source.peer()]._drop()
    end_s = time.monotonic() + patience(10)
    while second.pull(source.peer(), [1], [1]).num_blocks == 0:
        assert time.monotonic() < end_s


def test_a_source_that_sends_huge_lengths_is_no_source(made: Ends) -> None:
    receiver = made()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(told: bytes) -> None:
        caller, _ = listener.accept()
        with caller:
            caller.recv(4096)
            caller.sendall(told)
            caller.recv(1)

    size = 2 * 4 * 2 * 8 * 4
    cases = {
        tcp_frames.WELCOME.pack(tcp_frames.MAGIC, size, 2**16 - 1): "no worker's port",
        tcp_frames.WELCOME.pack(b"SSH-2.0-", size, 0): "no worker's port",
        tcp_frames.WELCOME.pack(tcp_frames.MAGIC, 2**64 - 1, 0): "bytes, those here",
        tcp_frames.encode_welcome(size) + struct.pack("<II", 2**32 - 1, 0): "4294967295 blocks",
    }
    peer = receiver.peer(handle=str(listener.getsockname()[1]).encode())
    for told, problem in cases.items():
        thread = threading.Thread(target=answer, args=(told,))
        thread.start()
        done = receiver.pull(peer, [1], [1])
        assert done.num_blocks == 0 and problem in done.problem
        thread.join()
    listener.close()


# --- identity ------------------------------------------------------------------------------------


def identity_of(made: MadeCertificates, **more: Path) -> IdentityOptions:
    return IdentityOptions(
        tls_cert=made.cert,
        tls_key=made.key,
        tls_client_ca=made.ca,
        tls_ca=made.ca,
        tls_client_cert=made.cert,
        tls_client_key=made.key,
        **more,
    )


def test_with_certificates_only_those_of_the_authority_read_blocks(
    made: Ends,
    authorities: dict[str, MadeCertificates],  # noqa: F811 - the fixture
) -> None:
    first, second = (
        TransportOptions(identity=identity_of(authorities[name])) for name in ("first", "second")
    )
    source, receiver = made(options=first), made(options=first)
    stranger, plain = made(options=second), made()
    source.fill()
    peer = source.peer(server_name="localhost")
    assert receiver.pull(peer, MANY, MANY).num_blocks == len(MANY)
    assert receiver.contents(MANY) == MANY
    for other in (stranger, plain):
        done = other.pull(peer, [1], [1])
        assert done.num_blocks == 0 and other.contents([1]) == [0]
    with connect(source) as silent:  # no handshake
        assert receiver.pull(peer, [3], [1]).num_blocks == 1
        silent.sendall(b"x" * 100)
        assert is_closed(silent)


def test_with_a_token_only_those_who_know_it_read_blocks(made: Ends, tmp_path: Path) -> None:
    files = {}
    for name in ("one", "other"):
        files[name] = tmp_path / name
        files[name].write_text(f"{name}-secret-of-the-services\n")
    one, other = (
        TransportOptions(identity=IdentityOptions(peer_token_file=path)) for path in files.values()
    )
    source, receiver = made(options=one), made(options=one)
    assert receiver.pull(source.peer(), [1], [1]).num_blocks == 1
    for stranger in (made(options=other), made()):
        assert stranger.pull(source.peer(), [1], [1]).num_blocks == 0


# --- plug-ins ------------------------------------------------------------------------------------


def test_an_unknown_transport_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTransport) as unknown:
        open_transport("smoke", TransportOptions())
    assert str(unknown.value) == "--kv-transport: 'smoke' is unknown; known are copy, tcp"


class Raising(KvTransport):
    """A plug-in that fails wherever it can."""

    def __init__(self, options: TransportOptions) -> None:
        self.where = ""

    def expose(self, kv: object) -> bytes:
        return b"here"

    def connect(self, peer: object) -> PeerSource:
        if self.where == "connect":
            raise ZeroDivisionError("connect")
        return _RaisingSource(self.where)

    def close(self) -> None:
        pass


class _RaisingSource(PeerSource):
    def __init__(self, where: str) -> None:
        self.where = where

    def fetch(self, theirs: object, ours: object) -> Transfer:
        if self.where == "fetch":
            raise ZeroDivisionError("fetch")
        return _RaisingTransfer(self.where)

    def close(self) -> None:
        raise ZeroDivisionError("close")


class _RaisingTransfer(Transfer):
    def __init__(self, where: str) -> None:
        self.where = where

    def poll(self) -> PullEnd | None:
        if self.where == "poll":
            raise ZeroDivisionError("poll")
        return PullEnd(1)

    def cancel(self) -> None:
        raise ZeroDivisionError("cancel")


def test_a_plug_in_that_raises_is_a_failed_pull(
    made: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        __import__("worker_svc.moves.transport", fromlist=["BUILT_IN"]).BUILT_IN,
        "raising",
        f"{__name__}:Raising",
    )
    end = made("raising")
    transport = end.fetches._transports["raising"]
    assert isinstance(transport, Raising)
    for where in ("connect", "fetch", "poll"):
        transport.where = where
        for _ in range(2):
            done = end.pull(end.peer(), [1], [1])
            assert (done.num_blocks, done.problem) == (0, f"ZeroDivisionError: {where}")
        told = [record for record in caplog.records if f"Error: {where}" in record.message]
        assert len(told) == 1, "logged once per cause"
    transport.where = ""
    assert end.pull(end.peer(), [1], [1]).num_blocks == 1
