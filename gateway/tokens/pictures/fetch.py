"""The content of a picture's URL: of the URL itself, or of a host that the operator named.

A host is looked up once; if any of its addresses is not public the picture is refused, and else the
connection goes to an address that was looked up, not to the name again. Redirects are followed by
the same rules. The HTTP library is Python's own: it lets a connection be opened beforehand, which
is the point here, and is used from a thread.
"""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0  # for all of it
MAX_URL_BYTES = 2048  # of one that is fetched
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 1 << 16
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.ASCII | re.IGNORECASE)
_PICTURE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "")
_HIDDEN = re.compile(r"[\x00-\x20\x7f\\]")  # that parsers read differently


class BadUrl(ValueError):
    """Raised for a URL that is not followed; says why."""


Address = tuple[str, int]
Lookup = Callable[[str, int], list[str]]
Connect = Callable[[Address, float], socket.socket]


def look_up(host: str, port: int) -> list[str]:
    """All addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def is_public(address: str) -> bool:
    """True for an address that anybody on the internet could reach."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in _TRANSLATED:  # IPv4 by a translator
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Reads the content of URLs, of `max_bytes` at most."""

    domains: Collection[str]  # hosts that pictures may be fetched from; empty: none
    max_bytes: int
    timeout_s: float = TIMEOUT_S
    look_up: Lookup = look_up
    connect: Connect = socket.create_connection

    def content(self, url: str) -> bytes:
        """The content of a URL; waits for it. Raises BadUrl."""
        if url[:5].lower() == "data:":
            return self._of_data(url)
        scheme = url.partition(":")[0].lower() if ":" in url[:32] else ""
        if scheme not in _PORTS:
            raise BadUrl("only data:, http: and https: URLs are read")
        if not self.domains:
            raise BadUrl(
                "pictures are taken as data: URLs alone; --allowed-media-domains names hosts "
                "that others are fetched from"
            )
        deadline_s = time.monotonic() + self.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            found = self._fetched(url, deadline_s)
            self._left(deadline_s)
            if isinstance(found, bytes):
                return found
            url = found
        raise BadUrl(f"it redirects more than {MAX_REDIRECTS} times")

    def _of_data(self, url: str) -> bytes:
        head = _DATA.match(url[:256])
        if head is None:
            raise BadUrl("it is no data: URL of a file")
        if head[1].strip().lower() not in _PICTURE_TYPES:
            raise BadUrl(f"{head[1].strip()[:64]!r} is not read, only PNG, JPEG, WebP and GIF")
        body, is_base64 = url[head.end() :], head[2].lower().endswith(";base64")
        if len(body) > (4 * self.max_bytes) // 3 + 4 if is_base64 else len(body) > self.max_bytes:
            raise self._too_large()
        if not is_base64:
            return unquote_to_bytes(body)
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise BadUrl("its base64 is damaged") from None

    def _too_large(self) -> BadUrl:
        return BadUrl(f"the file has more than {self.max_bytes >> 20} MiB, --max-picture-mib")

    def _fetched(self, url: str, deadline_s: float) -> bytes | str:
        """The content, or the URL that it is at."""
        scheme, host, port, target = self._parts(url)
        connection = http.client.HTTPConnection(host, port)
        try:
            opened = self._open(host, port, deadline_s)
        except OSError as error:
            raise BadUrl(f"it cannot be fetched ({type(error).__name__})") from None
        # However slowly bytes come, the time for all of them ends.
        end = threading.Timer(self._left(deadline_s), _end, (opened,))
        end.start()
        try:
            connection.sock = opened if scheme == "http" else _secured(opened, host)
            connection.request(
                "GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"}
            )
            answer = connection.getresponse()
            if answer.status in _REDIRECTS:
                location = answer.getheader("Location") or ""
                return urljoin(url, location)
            if answer.status != 200:
                raise BadUrl(f"its host answers with {answer.status}")
            if (answer.getheader("Content-Encoding") or "identity") != "identity":
                raise BadUrl("its host answers with compressed content")
            return self._body(answer)
        except (OSError, http.client.HTTPException) as error:
            self._left(deadline_s)
            raise BadUrl(f"it cannot be fetched ({type(error).__name__})") from None
        finally:
            end.cancel()
            connection.close()
            opened.close()

    def _parts(self, url: str) -> tuple[str, str, int, str]:
        """Scheme, host, port and target of a URL. Raises BadUrl."""
        if len(url) > MAX_URL_BYTES or _HIDDEN.search(url) or not url.isascii():
            raise BadUrl("it has characters that URLs do not have, or too many")
        try:
            split = urlsplit(url)
            port = split.port
        except ValueError:
            raise BadUrl("it is no URL") from None
        scheme, host = split.scheme.lower(), (split.hostname or "").lower()
        if scheme not in _PORTS:
            raise BadUrl("only data:, http: and https: URLs are read")
        if "@" in split.netloc:
            raise BadUrl("it has a user in front of its host")
        if host not in self.domains or port not in (None, _PORTS[scheme]):
            raise BadUrl("its host is not among --allowed-media-domains")
        target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        return scheme, host, _PORTS[scheme], target

    def _open(self, host: str, port: int, deadline_s: float) -> socket.socket:
        """A connection to an address of the host, if all of them are public. Raises BadUrl."""
        addresses = self.look_up(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise BadUrl("its host has an address that is not public")
        return self.connect((addresses[0], port), self._left(deadline_s))

    def _left(self, deadline_s: float) -> float:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise BadUrl(f"it takes more than {self.timeout_s:g} s")
        return left_s

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        content = bytearray()
        while part := answer.read(_CHUNK_BYTES):
            content += part
            if len(content) > self.max_bytes:
                raise self._too_large()
        if answer.length:
            raise BadUrl("its host leaves before the end")
        return bytes(content)


def _end(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _secured(opened: socket.socket, host: str) -> ssl.SSLSocket:
    return _tls().wrap_socket(opened, server_hostname=host)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
