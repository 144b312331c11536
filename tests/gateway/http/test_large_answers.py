"""A large answer is written in pieces, which together are what the encoder writes at once."""

import json
import random
from typing import Any

import pytest

from gateway.http.large_answers import PIECE_VALUES, pieces

SCALARS = (0, -1.5, 1e300, True, None, "", 'a "quote"', "é 😀 \u2028", [], {}, ())
LENGTHS = (0, 1, 3, PIECE_VALUES - 1, PIECE_VALUES, PIECE_VALUES + 1, 2 * PIECE_VALUES + 7)


def some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6) if depth else 0
    if kind < 2:
        return rng.choice(SCALARS)
    if kind == 2:
        return list(range(rng.choice(LENGTHS)))
    if kind == 3:
        return tuple(some_value(rng, depth - 1) for _ in range(rng.randrange(4)))
    return {str(key): some_value(rng, depth - 1) for key in range(rng.randrange(5))}


def test_the_pieces_are_the_json_of_the_whole() -> None:
    rng = random.Random(7)
    for _ in range(300):
        value = some_value(rng, 4)
        whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert b"".join(pieces(value)).decode() == whole


def test_no_piece_of_many_values_is_large() -> None:
    tops = {str(number): {"logprob": -1.5, "rank": number} for number in range(21)}
    answer = {"choices": [{"prompt_logprobs": [None, *[tops] * 500]}], "ids": list(range(50_000))}
    assert max(map(len, pieces(answer))) < 20 * PIECE_VALUES


def test_what_is_no_number_in_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        list(pieces({"a": [{"b": float("nan")}]}))
