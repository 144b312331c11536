"""What follows in a text is found where it followed before."""

import numpy as np
import pytest

from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.lookup import look_up
from scheduler_svc.speculation.options import Method, SpeculationOptions


def tokens(text: str) -> TokenIds:
    """One token per letter; none for |."""
    token_ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    return np.where(token_ids == ord("|"), -1, token_ids).astype(np.int32)


def found(text: str, method: Method, others: str = "", **fields: object) -> str:
    """The draft for a text, given other texts that each end with a |."""
    options = SpeculationOptions(method, **fields)  # type: ignore[arg-type]
    return bytes(look_up(tokens(text), options, tokens(others)).tolist()).decode()


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("a cat sat. a c", "at s"),
        ("the cat, the car, the c", "ar, "),  # the latest of equally long ones
        ("abcX, bcY, abc", "X, b"),  # the longest before the latest
        ("xyxyxy", "xyxy"),  # what repeats itself up to the end is repeated further
        ("abcdef", ""),
        ("abcda", ""),  # one token that agrees is too little
        ("a", ""),
    ],
)
def test_ngram_drafts_what_followed_the_longest_match(text: str, drafted: str) -> None:
    assert found(text, Method.NGRAM) == drafted


def test_ngram_compares_no_more_than_asked() -> None:
    text = "abcX, -bcY, abc"
    assert found(text, Method.NGRAM, prompt_lookup_max=2) == "Y, a"
    assert found(text, Method.NGRAM, prompt_lookup_max=3) == "X, -"
    assert found(text, Method.NGRAM, prompt_lookup_min=4) == ""
    assert found("ab-a", Method.NGRAM, prompt_lookup_min=1, num_speculative_tokens=2) == "b-"


def test_suffix_drafts_what_mostly_followed() -> None:
    assert found("x=1 x=1 x=1 x=2 x=", Method.SUFFIX) == "1 x"


def test_suffix_drafts_no_more_than_agrees() -> None:
    assert found("a cat sat. a", Method.SUFFIX) == ""  # one token is too little
    assert found("a cat sat. a c", Method.SUFFIX, num_speculative_tokens=8) == "at "
    assert found("a cat sat. a c", Method.SUFFIX, suffix_decoding_max_spec_factor=2.0) == "at s"


def test_suffix_stops_where_nothing_is_likely() -> None:
    text = "x1 x2 x3 x4 x"
    assert found(text, Method.SUFFIX, suffix_decoding_min_token_prob=0.4) == ""
    assert found(text, Method.SUFFIX, suffix_decoding_min_token_prob=0.3) == "4 "


@pytest.mark.parametrize(
    ("text", "others", "drafted"),
    [
        ("the cat", "a cat sat.|", " sat"),
        ("cat", "a cat sat.|the cat ran.|", " ran"),  # the latest of equals
        ("the cat", "a cat ran.|the cat sat.|my cat ran.|", " sat"),  # the longest before most
        ("the cat sat. the cat", "a cat ran.|", " sat"),  # its own are the latest
        ("the cat", "a cat|the cat|", ""),  # nothing follows the end of another
        ("the cat", "a cat|e cat!|", "!"),
        ("at", "cat|sat!|", "!"),
        ("ab", "xy|", ""),
    ],
)
def test_suffix_drafts_from_others(text: str, others: str, drafted: str) -> None:
    assert found(text, Method.SUFFIX, others, num_speculative_tokens=4, **SHARP)[:4] == drafted


SHARP = {"suffix_decoding_max_spec_factor": 4.0}
