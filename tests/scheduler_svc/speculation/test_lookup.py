"""What follows in a text is found where it followed before."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.lookup import look_up, look_up_rows
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


@st.composite
def _options(draw: st.DrawFn, method: Method) -> SpeculationOptions:
    least = draw(st.integers(1, 4))
    return SpeculationOptions(
        method,
        num_speculative_tokens=draw(st.integers(1, 8)),
        prompt_lookup_min=least,
        prompt_lookup_max=draw(st.integers(least, 12)),
        suffix_decoding_max_tree_depth=draw(st.integers(1, 30)),
        suffix_decoding_max_spec_factor=draw(st.sampled_from([0.5, 1.0, 4.0])),
        suffix_decoding_min_token_prob=draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])),
    )


def _texts(lengths: list[int], num_letters: int, seed: int) -> list[TokenIds]:
    random = np.random.default_rng(seed)
    return [random.integers(0, num_letters, n, dtype=np.int32) for n in lengths]


_LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 700))
_SEEDS = st.integers(0, 1 << 32)
_LETTERS = st.integers(1, 5)  # few, so that much repeats


@given(
    st.one_of(st.lists(_LENGTHS, max_size=9), st.lists(_LENGTHS, min_size=8, max_size=20)),
    _LETTERS,
    _SEEDS,
    st.sampled_from([Method.NGRAM, Method.NGRAM, Method.SUFFIX]).flatmap(_options),
)
def test_rows_are_looked_up_like_each_alone(
    lengths: list[int], num_letters: int, seed: int, options: SpeculationOptions
) -> None:
    _assert_like_each_alone(_texts(lengths, num_letters, seed), options, seed)


def test_rows_of_very_different_lengths_are_looked_up_like_each_alone() -> None:
    lengths = [1, 2, 9_000, 513, 512, *range(3, 30), 2_048, 4_096, 4_097, *range(600, 2_100, 50)]
    lengths += [4_000] * 40  # more than are searched at once
    for num_letters in (1, 2, 50):
        texts = _texts(lengths, num_letters, seed=num_letters)
        _assert_like_each_alone(texts, SpeculationOptions(Method.NGRAM), seed=0)


def _assert_like_each_alone(texts: list[TokenIds], options: SpeculationOptions, seed: int) -> None:
    """The rows are in no order, between others, and more follows what is known."""
    random = np.random.default_rng(seed)
    width = max(map(len, texts), default=0) + 40
    token_ids = random.integers(0, 2, (len(texts) + 3, width), dtype=np.int32)
    slots = random.permutation(len(token_ids))[: len(texts)]
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = text
    num_known = np.array([len(text) for text in texts], dtype=np.int32)
    found = look_up_rows(token_ids, slots, num_known, options)
    assert all(draft.dtype == np.int32 for draft in found)
    assert [draft.tolist() for draft in found] == [
        look_up(text, options).tolist() for text in texts
    ]


@given(
    st.integers(1, 700), st.lists(st.integers(1, 300)), _LETTERS, _SEEDS, _options(Method.SUFFIX)
)
def test_suffix_counts_what_followed(
    length: int, lengths: list[int], num_letters: int, seed: int, options: SpeculationOptions
) -> None:
    text, *others = _texts([length, *lengths], num_letters, seed)
    joined = [token_id for other in others for token_id in [*other.tolist(), -1]]
    found = look_up(text, options, np.array(joined, dtype=np.int32))
    assert found.tolist() == _plainly_counted(joined, text.tolist(), options)


def _plainly_counted(others: list[int], own: list[int], options: SpeculationOptions) -> list[int]:
    text = others + own
    ends, length = list(range(1, len(text))), 0
    for depth in range(1, min(options.suffix_decoding_max_tree_depth, len(own)) + 1):
        longer = [end for end in ends if text[max(end - depth, 0) : end] == own[-depth:]]
        if not longer:
            break
        ends, length = longer, depth
    most = min(
        options.num_speculative_tokens, int(options.suffix_decoding_max_spec_factor * length)
    )
    drafted: list[int] = []
    probability = 1.0
    while length > 1 and len(drafted) < most:
        ends = [end for end in ends if end < len(text) and text[end] >= 0]
        following = [text[end] for end in ends]
        if not following:
            break
        counts = Counter(following)
        latest = [t for t in following if counts[t] == max(counts.values())][-1]
        probability *= counts[latest] / len(following)
        if probability < options.suffix_decoding_min_token_prob:
            break
        drafted.append(latest)
        ends = [end + 1 for end in ends if text[end] == latest]
    return drafted
