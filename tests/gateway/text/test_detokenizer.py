"""The pieces of a text joined are the text of all tokens, without incomplete characters."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from gateway.text.detokenizer import (
    REPLACEMENT,
    ByteLevelDetokenizer,
    Detokenizer,
    Vocabulary,
    WindowDetokenizer,
)
from gateway.tokens.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "😀🎉 family: 👩‍👩‍👧 flag: 🇫🇷",
    "中文和日本語の文字",
    "combining: e\u0301 a\u0308\u0323, naïve",
    "a\u200bzero-width and \u00a0 spaces\n\n\ttabs",
    "",
]


@pytest.fixture(scope="module")
def byte_level(model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2's: words with a visible space, and one token per byte for all else."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "Hello", "中", "!"]
    vocabulary = {word: index for index, word in enumerate(words)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    return tokenizer


def ids_of(tokenizer: tokenizers.Tokenizer, *parts: str | bytes) -> list[int]:
    """Words by their token, bytes by one token each."""
    ids: list[int] = []
    for part in parts:
        names = [part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part]
        ids += [tokenizer.token_to_id(name) for name in names]
    return ids


def make(form: type, vocabulary: Vocabulary, *, skip: bool) -> Detokenizer:
    return form(vocabulary, vocabulary.hidden_ids(skip_special_tokens=skip))


def pieces_of(detokenizer: object, ids: list[int], step: int = 1) -> list[str]:
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_byte_level_pieces_join_to_the_text(
    text: str, step: int, byte_level: tokenizers.Tokenizer
) -> None:
    ids = byte_level.encode(text).ids
    detokenizer = make(ByteLevelDetokenizer, Vocabulary(byte_level), skip=True)
    pieces = pieces_of(detokenizer, ids, step)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
def test_random_byte_level_ids_join_to_what_decode_says(
    skip: bool, byte_level: tokenizers.Tokenizer
) -> None:
    # Most of these are invalid UTF-8, some ids are special, added, or beyond the vocabulary.
    draw = random.Random(0)
    vocabulary = Vocabulary(byte_level)
    top = byte_level.get_vocab_size() + 5
    for _ in range(1000):
        ids = [draw.randrange(top) for _ in range(draw.randrange(1, 40))]
        detokenizer = make(ByteLevelDetokenizer, vocabulary, skip=skip)
        pieces = pieces_of(detokenizer, ids, draw.randrange(1, 4))
        assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


def test_every_single_byte_level_id_has_the_bytes_decode_gives(
    byte_level: tokenizers.Tokenizer,
) -> None:
    table = Vocabulary(byte_level).byte_table(frozenset())
    for token_id in range(byte_level.get_vocab_size()):
        text = table[token_id].decode("utf-8", "replace")
        assert text == byte_level.decode([token_id], skip_special_tokens=False)


def test_a_character_is_held_until_its_last_byte(encode: Callable[[str], list[int]]) -> None:
    # Four byte tokens of one emoji: three without text, then the character.
    plain = tokenizers.Tokenizer(models.BPE(_byte_vocabulary(), []))
    plain.decoder = decoders.ByteLevel()
    detokenizer = make(ByteLevelDetokenizer, Vocabulary(plain), skip=True)
    pieces = [detokenizer.push([byte]) for byte in "🎃".encode()]
    assert pieces == ["", "", "", "🎃"]


def _byte_vocabulary() -> dict[str, int]:
    table = {}
    spare = 256
    for byte in range(256):
        is_plain = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        table[chr(byte) if is_plain else chr(spare)] = byte
        spare += not is_plain
    return table


def test_a_stream_that_never_completes_a_character_is_flushed() -> None:
    plain = tokenizers.Tokenizer(models.BPE(_byte_vocabulary(), []))
    plain.decoder = decoders.ByteLevel()
    ids = list("🎃".encode()[:3])
    detokenizer = make(ByteLevelDetokenizer, Vocabulary(plain), skip=True)
    assert pieces_of(detokenizer, ids) == ["", "", "", REPLACEMENT]


def test_special_tokens_are_shown_or_left_out(byte_level: tokenizers.Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>Hello<think><|im_end|>").ids
    vocabulary = Vocabulary(byte_level)
    hidden = make(ByteLevelDetokenizer, vocabulary, skip=True)
    shown = make(ByteLevelDetokenizer, vocabulary, skip=False)
    assert "".join(pieces_of(hidden, ids)) == "Hello<think>"
    assert "".join(pieces_of(shown, ids)) == "<|im_start|>Hello<think><|im_end|>"


@pytest.mark.parametrize(
    "parts",
    [
        ("▁Hello", "▁world", "!"),
        ("▁", "Hello", "▁", "▁world"),
        ("<s>", "▁Hello", "</s>", "▁world", "<unk>", "▁", "▁Hello"),
        ("▁Hello", "🎃 é".encode(), "▁world", "中", "ü".encode()),
        ("中文字和日本".encode(),),
        ("▁", "▁", "▁", "Hello"),
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_byte_fallback_pieces_join_to_what_decode_says(
    parts: tuple[str | bytes, ...], skip: bool, byte_fallback: tokenizers.Tokenizer
) -> None:
    ids = ids_of(byte_fallback, *parts)
    expected = byte_fallback.decode(ids, skip_special_tokens=skip)
    for step in (1, 3):
        detokenizer = make(WindowDetokenizer, Vocabulary(byte_fallback), skip=skip)
        pieces = pieces_of(detokenizer, ids, step)
        assert "".join(pieces) == expected
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_random_valid_byte_fallback_ids_join_to_what_decode_says(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    draw = random.Random(1)
    words: list[str | bytes] = ["▁", "▁Hello", "▁world", "Hello", "中", "!", "</s>"]
    words += [text.encode() for text in ("é", "中", "😀", "\u0301", "x")]
    vocabulary = Vocabulary(byte_fallback)
    for _ in range(300):
        ids = ids_of(byte_fallback, *(draw.choice(words) for _ in range(draw.randrange(1, 20))))
        detokenizer = make(WindowDetokenizer, vocabulary, skip=True)
        assert "".join(pieces_of(detokenizer, ids)) == byte_fallback.decode(ids)


def test_a_wrong_byte_does_not_take_back_what_was_shown(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    ids = ids_of(byte_fallback, "中".encode(), b"\xff", "▁Hello")
    detokenizer = make(WindowDetokenizer, Vocabulary(byte_fallback), skip=True)
    assert "".join(pieces_of(detokenizer, ids)) == f"中{REPLACEMENT} Hello"


def test_endless_wrong_bytes_are_shown_and_cost_the_same_per_token(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    byte = ids_of(byte_fallback, b"\xff")
    detokenizer = make(WindowDetokenizer, Vocabulary(byte_fallback), skip=True)
    shown = "".join(detokenizer.push(byte) for _ in range(1000)) + detokenizer.flush()
    assert shown == REPLACEMENT * 1000


def test_the_last_of_many_tokens_costs_no_more_than_the_first(
    byte_fallback: tokenizers.Tokenizer, byte_level: tokenizers.Tokenizer
) -> None:
    forms = (
        (WindowDetokenizer, byte_fallback, ids_of(byte_fallback, "▁Hello")),
        (ByteLevelDetokenizer, byte_level, byte_level.encode(" world").ids[:1]),
    )
    for form, tokenizer, ids in forms:
        detokenizer = make(form, Vocabulary(tokenizer), skip=True)
        times = []
        for _ in range(20):
            start = time.thread_time()
            for _ in range(500):
                detokenizer.push(ids)
            times.append(time.thread_time() - start)
        # With quadratic cost the later rounds would take ten times as long.
        assert min(times[-5:]) < 4 * min(times[:5])


def test_the_form_follows_the_decoder(
    tokenizer: Tokenizer, byte_fallback: tokenizers.Tokenizer
) -> None:
    other = Tokenizer(byte_fallback.to_str().encode(), None)
    assert isinstance(tokenizer.detokenizer(skip_special_tokens=True), ByteLevelDetokenizer)
    assert isinstance(other.detokenizer(skip_special_tokens=True), WindowDetokenizer)


def test_a_special_token_that_means_something_is_shown_among_those_that_are_skipped(
    byte_level: tokenizers.Tokenizer, byte_fallback: tokenizers.Tokenizer
) -> None:
    for form, tokenizer, shown, hidden in (
        (ByteLevelDetokenizer, byte_level, "<|im_start|>", "<|im_end|>"),
        (WindowDetokenizer, byte_fallback, "<s>", "</s>"),
    ):
        vocabulary = Vocabulary(tokenizer)
        ids = [tokenizer.token_to_id(shown), tokenizer.token_to_id(hidden)]
        wanted = [shown, "no such token"]
        hidden_ids = vocabulary.hidden_ids(skip_special_tokens=True, shown_tokens=wanted)
        assert "".join(pieces_of(form(vocabulary, hidden_ids), ids)) == shown
