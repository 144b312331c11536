"""What a JSON text holds is counted as it arrives, wherever it is cut."""

import json
import random
from typing import Any

import pytest

from gateway.edge.json_count import JsonCount

MARKS = ",:[{"
PIECES = ['"', "\\", "\\\\", '\\"', ",", ":", "[", "{", "é", "語", "😀", "\n", "ud83d", "a", " "]


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 3:
        return "".join(rng.choices(PIECES, k=rng.randrange(8)))
    if kind < 5:
        return rng.choice([1, -2.5, None, True])
    if kind < 7:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {"".join(rng.choices(PIECES, k=3)): drawn(rng, depth + 1) for _ in range(3)}


def marks_of(text: str) -> int:
    """The marks outside of texts, character by character."""
    count, is_in_text, is_escaped = 0, False, False
    for character in text:
        if is_in_text:
            is_in_text = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        else:
            is_in_text = character == '"'
            count += character in MARKS
    return count


def counted(data: bytes, sizes: Any) -> JsonCount:
    count, at = JsonCount(), 0
    while at < len(data):
        size = next(sizes)
        count.add(data[at : at + size])
        at += size
    return count


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_marks_are_counted_wherever_the_text_is_cut(ensure_ascii: bool) -> None:
    rng = random.Random(7)
    for _ in range(300):
        text = json.dumps(drawn(rng), ensure_ascii=ensure_ascii)
        data, expected = text.encode(), marks_of(text)
        for most in (1, 2, 3, 9, len(data) + 1):
            sizes = iter(lambda most=most: rng.randint(1, most), None)
            assert counted(data, sizes).num_marks == expected, text


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ('"plain"', 1),
        ('"é"', 2),
        ('"語"', 2),
        (r'"\u8a9e"', 2),
        ('"😀"', 4),
        ('"\U0010ffff"', 4),
        (r'"\ud83d\ude00"', 4),
        (r'"\uD83D\uDE00"', 4),
    ],
)
def test_one_wide_character_widens_the_whole_wherever_it_is_cut(text: str, width: int) -> None:
    data = text.encode()
    for size in range(1, len(data) + 1):
        count = counted(data, iter(lambda size=size: size, None))
        assert count.width == width


def test_a_wide_character_is_as_wide_as_is_said() -> None:
    narrow, wide = "a" * 10_000, "a" * 9_999 + "😀"
    assert wide.__sizeof__() > 3.9 * narrow.__sizeof__()
