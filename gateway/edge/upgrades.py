"""Requests that ask for another protocol. None is spoken here, so each is read as it stands.

RFC 9110 (7.8) lets a server ignore `Upgrade`; the body then follows as in any request. The parser
cannot ignore it: it stops after the headers. So another one reads the same headers without that
field, and whatever follows is framed by the rules that frame all requests.
"""

from collections.abc import Sequence

UPGRADE = b"upgrade"
TUNNEL = b"CONNECT"  # a method whose connection is no longer HTTP once it is answered


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """The request line and headers, as a client writes them that asks for no other protocol.

    All parts are from the parser, which lets no line break through.
    """
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != UPGRADE]
    return b"\r\n".join((*lines, b"", b""))
