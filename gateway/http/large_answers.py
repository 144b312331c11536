"""Calls of many requests and answers of many values are built in a thread.

Answers are written there, small piece by small piece.

The event loop goes on meanwhile: one long call of the encoder would keep the interpreter to itself.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response

from gateway.pipeline.pipeline import INLINE_VALUES, Pipeline

INLINE_PARTS = 64
PIECE_VALUES = 2000  # written at once: less than a millisecond
FLAT_TYPES = frozenset({str, int, float, bool, type(None)})

Result = TypeVar("Result")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def answered(
    pipeline: Pipeline, body: Callable[[], Mapping[str, Any]], *, num_values: int
) -> Response:
    """The JSON of a body that holds about so many numbers and strings."""
    if num_values <= INLINE_VALUES:
        return JSONResponse(body())
    content = await pipeline.run_aside(lambda: b"".join(pieces(body())))
    return Response(content, media_type="application/json")


async def built(
    pipeline: Pipeline, make: Callable[[], list[Result]], *, num_parts: int
) -> list[Result]:
    """The requests of a call of about so many."""
    return make() if num_parts <= INLINE_PARTS else await pipeline.run_aside(make)


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, in pieces none of which takes long to write."""
    if isinstance(value, Mapping) and not _is_flat(value.values()):
        before = "{"
        for key, inner in value.items():
            yield f"{before}{_encode(key)}:".encode()
            yield from pieces(inner)
            before = ","
        yield b"}"
    elif isinstance(value, list | tuple) and value:
        yield from _list_pieces(value)
    else:
        yield _encode(value).encode()


def _list_pieces(values: Sequence[Any]) -> Iterator[bytes]:
    before = b"["
    for start in range(0, len(values), PIECE_VALUES):
        some = values[start : start + PIECE_VALUES]
        if _is_flat(some):
            yield before + _encode(some)[1:-1].encode()
            before = b","
            continue
        for value in some:
            yield before
            yield from pieces(value)
            before = b","
    yield b"]"


def _is_flat(values: Iterable[Any]) -> bool:
    """True if none of the values holds others."""
    return FLAT_TYPES.issuperset(map(type, values))
