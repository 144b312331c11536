"""Answers of the process that reads pictures: pixels, or why there are none."""

import json
from dataclasses import dataclass

from wire.forks import frames

_HEAD_BYTES = 4


class UnreadPicture(ValueError):
    """Raised for a file that is not read; says why."""


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """The pixels of one picture, and the tokens that stand for it."""

    num_tokens: int
    values: bytes  # rows x 3 colours x pixels
    num_rows: int
    grid: tuple[int, int, int] | None  # patches in time, height and width


def pack_answer(picture: ProcessedPicture) -> bytes:
    """A picture as an answer."""
    facts = {"num_tokens": picture.num_tokens, "num_rows": picture.num_rows, "grid": picture.grid}
    head = json.dumps(facts).encode()
    return frames.FOLLOWED + len(head).to_bytes(_HEAD_BYTES, "little") + head + picture.values


def unpack_answer(answer: bytes) -> ProcessedPicture:
    """The picture of an answer. Raises UnreadPicture."""
    kind, rest = answer[:1], answer[1:]
    if kind != frames.FOLLOWED:
        raise UnreadPicture(rest.decode(errors="replace"))
    end = _HEAD_BYTES + int.from_bytes(rest[:_HEAD_BYTES], "little")
    facts = json.loads(rest[_HEAD_BYTES:end])
    grid = None if facts["grid"] is None else tuple(facts["grid"])
    return ProcessedPicture(facts["num_tokens"], rest[end:], facts["num_rows"], grid)
