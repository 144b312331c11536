"""HTTP/2 frames by hand, for what no client library sends: floods, resets, broken frames.

HPACK is written without tables and without Huffman codes, which every server reads.
"""

import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = 8
MAX_STREAM_ID = (1 << 31) - 1
_MAX_PREFIXED = 127

Header = tuple[bytes, bytes]


def frame(kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    """One frame; its length is that of the payload."""
    head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
    return head + payload


def opening() -> bytes:
    """The first bytes of a client: the preface and empty settings."""
    return PREFACE + frame(SETTINGS)


def header_block(headers: Sequence[Header]) -> bytes:
    """Headers as literals that are never indexed."""
    return b"".join(b"\x10" + _string(name) + _string(value) for name, value in headers)


def grpc_headers(path: str, *more: Header) -> bytes:
    """The header block of a gRPC call."""
    return header_block(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *more,
        ]
    )


def message(body: bytes, *, is_compressed: bool = False) -> bytes:
    """A gRPC message with its five-byte head."""
    return struct.pack(">BI", is_compressed, len(body)) + body


def call(stream: int, path: str, body: bytes, *more: Header) -> bytes:
    """A whole unary call: headers, message, end."""
    head = frame(HEADERS, grpc_headers(path, *more), stream=stream, flags=END_HEADERS)
    return head + frame(DATA, message(body), stream=stream, flags=END_STREAM)


def _string(text: bytes) -> bytes:
    if len(text) < _MAX_PREFIXED:
        return bytes([len(text)]) + text
    length, rest = bytearray([_MAX_PREFIXED]), len(text) - _MAX_PREFIXED
    while rest >= 128:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*length, rest]) + text
