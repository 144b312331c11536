"""URLs of pictures: what is no public host that the operator named is refused, by name."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.tokens.pictures.fetch import BadUrl, Fetcher, is_public, look_up
from tests.pace import patience

HOST = "pictures.example"
PUBLIC = "93.184.216.34"
HOSTILE_URLS = {
    "file:///etc/passwd": "only data:, http: and https:",
    "FILE:///etc/passwd": "only data:, http: and https:",
    "ftp://pictures.example/a.png": "only data:, http: and https:",
    "gopher://pictures.example/": "only data:, http: and https:",
    "/etc/passwd": "only data:, http: and https:",
    "": "only data:, http: and https:",
    "javascript:alert(1)": "only data:, http: and https:",
    "blob:https://pictures.example/1": "only data:, http: and https:",
    "http://127.0.0.1/": "not among --allowed",
    "http://2130706433/": "not among --allowed",
    "http://0177.0.0.1/": "not among --allowed",
    "http://0x7f000001/": "not among --allowed",
    "http://127.1/": "not among --allowed",
    "http://[::1]/": "not among --allowed",
    "http://[::ffff:127.0.0.1]/": "not among --allowed",
    "http://[fe80::1%25eth0]/": "not among --allowed|no URL",
    "http://169.254.169.254/latest/meta-data/": "not among --allowed",
    "http://metadata.google.internal/": "not among --allowed",
    "http://localhost/": "not among --allowed",
    "http://evil.example/": "not among --allowed",
    "http://pictures.example.evil.example/": "not among --allowed",
    "http://pictures.example./": "not among --allowed",
    "http://pictures.example:22/": "not among --allowed",
    "http://pictures.example:99999/": "no URL",
    "http://pictures.example@evil.example/": "a user in front",
    "http://evil.example@pictures.example/": "a user in front",
    "http://pictures.example\\@evil.example/": "characters that URLs do not have",
    "http://pictures.example/\r\nHost: evil": "characters that URLs do not have",
    "http://pictures.example/ a": "characters that URLs do not have",
    "http://pictures.example/\x00": "characters that URLs do not have",
    "http://\uff50ictures.example/": "characters that URLs do not have",
    "http:///a.png": "not among --allowed",
    "http://[pictures.example/": "no URL",
    f"http://pictures.example/{'a' * 3000}": "or too many",
    "data:text/html;base64,aGk=": "'text/html' is not read",
    "data:image/svg+xml,<svg/>": "'image/svg\\+xml' is not read",
    "data:image/png;base64,a": "damaged",
    "data:image/png;base64,!!!!": "damaged",
    "data:image/png": "no data: URL",
    "data:": "no data: URL",
}
# Names that the operator allowed, and what they are found at.
HOSTILE_ADDRESSES = [
    ["127.0.0.1"],
    ["10.0.0.8"],
    ["172.16.0.1"],
    ["192.168.1.1"],
    ["169.254.169.254"],
    ["100.64.0.1"],
    ["0.0.0.0"],
    ["224.0.0.1"],
    ["255.255.255.255"],
    ["::1"],
    ["::"],
    ["fe80::1%eth0"],
    ["fc00::1"],
    ["fd00:ec2::254"],
    ["ff02::1"],
    ["::ffff:10.0.0.1"],
    ["::ffff:127.0.0.1"],
    ["64:ff9b::7f00:1"],
    ["2002:7f00:1::"],
    ["2001:0:0:0:0:0:80ff:fffe"],
    [PUBLIC, "127.0.0.1"],
    ["no address"],
    [],
]


def fetcher(
    found: dict[str, list[str]] | None = None, port: int | None = None, **fields: Any
) -> Fetcher:
    """A fetcher whose names are found in a table, and whose connections go to a port here."""
    hosts = found if found is not None else {HOST: [PUBLIC]}
    asked: list[str] = []

    def look(host: str, _: int) -> list[str]:
        assert host not in asked, "a name is looked up once"
        asked.append(host)
        return hosts[host]

    def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
        assert address[0] in hosts.get(HOST, []) + hosts.get("other.example", [])
        assert port is not None, f"it connects to {address}"
        return socket.create_connection(("127.0.0.1", port), timeout_s)

    options = {"domains": frozenset(hosts), "max_bytes": 1 << 20, **fields}
    return Fetcher(look_up=look, connect=connect, **options)


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_hostile_url_is_refused_before_anything_is_opened(url: str) -> None:
    with pytest.raises(BadUrl, match=HOSTILE_URLS[url]):
        fetcher().content(url)


@pytest.mark.parametrize("addresses", HOSTILE_ADDRESSES)
def test_a_name_that_is_found_at_an_address_of_the_inside_is_refused(addresses: list[str]) -> None:
    with pytest.raises(BadUrl, match="an address that is not public"):
        fetcher({HOST: addresses}).content(f"https://{HOST}/a.png")


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "0x7f.1", "127.1", "localhost"])
def test_an_operator_who_names_this_machine_in_any_form_opens_nothing(host: str) -> None:
    with pytest.raises(BadUrl, match=r"not public|cannot be fetched"):
        Fetcher(frozenset([host]), 100, look_up=look_up, connect=_no_connection).content(
            f"http://{host}/"
        )


def _no_connection(address: tuple[str, int], timeout_s: float) -> socket.socket:
    raise AssertionError(f"it connects to {address}")


def test_without_named_hosts_data_alone_is_read() -> None:
    with pytest.raises(BadUrl, match="--allowed-media-domains names hosts"):
        fetcher({}).content(f"https://{HOST}/a.png")
    assert fetcher({}).content("data:image/png;base64,aGk=") == b"hi"
    assert fetcher({}).content("data:;base64,aGk=") == b"hi"
    assert fetcher({}).content("DATA:image/PNG;charset=x;base64,aGk=") == b"hi"
    assert fetcher({}).content("data:image/gif,h%69") == b"hi"


def test_public_addresses_are_public() -> None:
    assert is_public(PUBLIC) and is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("64:ff9b::5db8:d822")


Answer = Callable[[socket.socket], None]


@contextmanager
def host_of(*answers: Answer) -> Iterator[int]:
    """A host on a free port that gives each connection the next answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(patience(20))
                    try:
                        connection.recv(1 << 16)
                        answer(connection)
                    except OSError:
                        pass  # the other side has left, as it should

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(patience(20))
        assert not thread.is_alive()


def _with(head: str, body: bytes = b"") -> Answer:
    content = f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode() + body
    return lambda connection: connection.sendall(content)


def test_a_picture_of_a_named_host_is_fetched_and_redirects_are_followed() -> None:
    moved = _with("302 Found\r\nLocation: http://other.example/b.png")
    found = {HOST: [PUBLIC], "other.example": ["93.184.216.35"]}
    with host_of(moved, _with("200 OK", b"content")) as port:
        assert fetcher(found, port).content(f"http://{HOST}/a.png") == b"content"


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("http://127.0.0.1/", "not among --allowed"),
        ("http://evil.example/", "not among --allowed"),
        ("file:///etc/passwd", "only data:"),
        ("//evil.example/", "not among --allowed"),
        ("http://inside.example/", "not public"),
        ("", "a name is looked up once|redirects"),
    ],
)
def test_a_redirect_is_judged_as_the_first_url_is(location: str, problem: str) -> None:
    found = {HOST: [PUBLIC], "inside.example": ["10.1.2.3"]}
    moved = host_of(_with(f"301 Moved\r\nLocation: {location}"))
    with moved as port, pytest.raises((BadUrl, AssertionError), match=problem):
        fetcher(found, port).content(f"http://{HOST}/a.png")


def test_redirects_end() -> None:
    found = {f"h{n}.example": [PUBLIC] for n in range(9)} | {HOST: [PUBLIC]}
    answers = [_with(f"302 Found\r\nLocation: http://h{n}.example/") for n in range(4)]
    with host_of(*answers) as port, pytest.raises(BadUrl, match="redirects more than 3 times"):
        fetcher(found, port).content(f"http://{HOST}/a.png")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (_with("200 OK", bytes((1 << 20) + 1)), "more than 1 MiB, --max-picture-mib"),
        (_with("200 OK\r\nContent-Encoding: gzip", b"x"), "compressed content"),
        (_with("404 Not Found"), "answers with 404"),
        (_with("204 No Content"), "answers with 204"),
        (lambda connection: connection.sendall(b"garbage\r\n\r\n"), "cannot be fetched"),
        (lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" * 9999), "cannot be fetched"),
        (lambda connection: None, "cannot be fetched"),
        (_with("200 OK\r\nContent-Length: 99", b"cut"), "leaves before the end"),
    ],
)
def test_what_a_host_should_not_answer_is_refused(answer: Answer, problem: str) -> None:
    with host_of(answer) as port, pytest.raises(BadUrl, match=problem):
        fetcher(port=port).content(f"http://{HOST}/a.png")


def test_a_host_that_drips_is_left_after_the_time_for_all() -> None:
    left = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while not left.wait(0.05):
            connection.sendall(b"x")

    with host_of(drip) as port:
        with pytest.raises(BadUrl, match=r"takes more than 0\.5 s"):
            fetcher(port=port, timeout_s=0.5).content(f"http://{HOST}/a.png")
        left.set()
