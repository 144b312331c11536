"""A SentencePiece tokenizer of a GGUF file gives the ids of SentencePiece and of transformers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from pagewire.gguf.files import CONTENTS, read_file
from pagewire.gguf.header import BadGguf
from pagewire.gguf.sentencepiece import MAX_CHARACTERS, pairs_by_score
from tests.gguf_files import GgufFile, gemma_vocabulary, sentencepiece_vocabulary

SPACE = "\u2581"
TEXTS = [
    "hello world",
    "hello  world   and\n\n\nnew lines\t\ttabs",
    "caf\u00e9 \u4e2d\u6587 \U0001f44b\U0001f3fd Ab\x00\x07",
    "<0x41> [INST] < s> </ s>",
    f"a{SPACE}b{SPACE}{SPACE}c",
    "x" + " " * 40 + "y",
    "held helloworld wholehearted bad cab deal a b c",
]
LEADING = [" hello", "  hello", "\n hello", " "]
CONTROLS = ["<s>hello</s>", "hello<s> world</s></s>", "<unk>hello<unk>"]


class Reference:
    """SentencePiece's way with a text, one joined pair after the other."""

    def __init__(self, vocabulary: dict[str, Any]) -> None:
        read = {key.removeprefix("tokenizer.ggml."): value for key, value in vocabulary.items()}
        self._ids = {token: index for index, token in enumerate(read["tokens"])}
        self._scores: dict[str, float] = {}
        self._whole: list[tuple[str, int]] = []  # tokens that are never cut, the longest first
        for index, token in enumerate(read["tokens"]):
            if read["token_type"][index] == 1:
                self._scores[token] = read["scores"][index]
            elif read["token_type"][index] == 4:
                self._whole.append((token.replace(" ", SPACE), index))
        self._whole.sort(key=lambda each: -len(each[0]))
        self._prefix = SPACE if read.get("add_space_prefix", True) else ""

    def ids(self, text: str) -> list[int]:
        text = (self._prefix if text else "") + text.replace(" ", SPACE)
        found: list[int] = []
        pieces: list[str] = []
        while text:
            whole = next((each for each in self._whole if text.startswith(each[0])), None)
            if whole is None:
                pieces.append(text[0])
                text = text[1:]
            else:
                found += [*self._joined(pieces), whole[1]]
                pieces, text = [], text[len(whole[0]) :]
        return found + self._joined(pieces)

    def _joined(self, pieces: list[str]) -> list[int]:
        pieces = list(pieces)
        while True:
            pairs = [left + right for left, right in pairwise(pieces)]
            known = [at for at, pair in enumerate(pairs) if pair in self._scores]
            if not known:
                break
            at = max(known, key=lambda at: (self._scores[pairs[at]], -at))
            pieces[at : at + 2] = [pairs[at]]
        return [index for piece in pieces for index in self._of(piece)]

    def _of(self, piece: str) -> list[int]:
        if piece in self._scores:
            return [self._ids[piece]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]


def written(folder: Path, vocabulary: dict[str, Any], architecture: str = "llama") -> Path:
    """A file of a vocabulary, and of nothing else that a tokenizer needs."""
    length = {f"{architecture}.context_length": 64}
    return GgufFile(architecture, length | vocabulary).write(folder / "model.gguf")


def built(path: Path) -> tokenizers.Tokenizer:
    content = read_file(path, "tokenizer.json")
    assert content is not None
    return tokenizers.Tokenizer.from_str(content.decode())


def of_transformers(path: Path, architecture: str) -> tokenizers.Tokenizer:
    """The tokenizer that transformers makes of a file for this architecture."""
    _, content, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, content)[0]


VOCABULARIES = {"llama": sentencepiece_vocabulary, "gemma3": gemma_vocabulary}


@pytest.fixture(scope="module", params=VOCABULARIES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tokenizers.Tokenizer, Reference]:
    """Ours, and SentencePiece's, of one file."""
    told = VOCABULARIES[request.param]()
    path = written(tmp_path_factory.mktemp(request.param), told, request.param)
    return built(path), Reference(told)


@pytest.mark.parametrize("text", [*TEXTS, *LEADING, ""])
def test_a_text_has_the_ids_of_sentencepiece_and_comes_back(
    text: str, both: tuple[tokenizers.Tokenizer, Reference]
) -> None:
    ours, reference = both
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference.ids(text)
    assert ours.decode(ids, skip_special_tokens=False) == text.replace(SPACE, " ")


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("abcdehlorw\u00e9\u4e2d\u6587 \n"), max_size=40))
def test_any_text_has_the_ids_of_sentencepiece(
    text: str, both: tuple[tokenizers.Tokenizer, Reference]
) -> None:
    ours, reference = both
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference.ids(text)
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_pairs_are_joined_in_an_order_that_ids_do_not_have(tmp_path: Path) -> None:
    ours = built(written(tmp_path, sentencepiece_vocabulary()))
    texts = ("hello", "herd", "world")
    found = [ours.encode(text, add_special_tokens=False).tokens for text in texts]
    assert found[0][0] == f"{SPACE}he" and found[2][0] == f"{SPACE}w"
    vocabulary = ours.get_vocab()
    ids = [vocabulary[token] for token in (f"{SPACE}h", "er", "lo", f"{SPACE}w")]
    assert ids != sorted(ids)


def test_texts_have_the_ids_of_transformers(tmp_path: Path) -> None:
    path = written(tmp_path, sentencepiece_vocabulary())
    ours = built(path)
    # For Llama transformers puts no second space before a text, and none after a special token.
    plain, exact = (of_transformers(path, name) for name in ("llama", "phi3"))
    exact.add_special_tokens(["<unk>"])
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == plain.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == plain.decode(ids)
    for text in TEXTS + LEADING + CONTROLS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == exact.encode(text, add_special_tokens=False).ids, text


def test_texts_without_a_space_before_them_have_the_ids_of_transformers(tmp_path: Path) -> None:
    told = gemma_vocabulary()
    # transformers takes the order of the ids for that of the scores, as it is in Gemma's files.
    tokens, scores = (told[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    begin = tokens.index("<0xFF>") + 1
    ordered = sorted(zip(scores[begin:], tokens[begin:], strict=True), reverse=True)
    scores[begin:], tokens[begin:] = zip(*ordered, strict=True)
    path = written(tmp_path, told, "gemma3")
    ours, theirs = built(path), of_transformers(path, "gemma3")
    theirs.add_special_tokens(["<unk>"])
    for text in [*TEXTS, *LEADING, *CONTROLS, "a<think> b", "  <think>\n\n\n"]:
        if " " * 9 in text:  # their pairs of spaces do not make the longest token first
            continue
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_the_longest_run_of_spaces_that_is_a_token_comes_first(tmp_path: Path) -> None:
    ours = built(written(tmp_path, gemma_vocabulary(), "gemma3"))
    found = ours.encode("a" + " " * 10 + "b", add_special_tokens=False).tokens
    assert found == ["a", SPACE * 8, SPACE * 2, "b"]
    assert ours.encode(f"a{SPACE}{SPACE}b", add_special_tokens=False).tokens[1] == SPACE * 2


def test_a_text_begins_with_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    told = sentencepiece_vocabulary()
    assert built(written(tmp_path, told)).encode("a").tokens == ["<s>", f"{SPACE}a"]
    config = json.loads(read_file(tmp_path / "model.gguf", "tokenizer_config.json") or b"")
    assert config["add_bos_token"] is True and config["add_eos_token"] is False
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    changed = sentencepiece_vocabulary(add_bos_token=False, add_eos_token=True)
    assert built(written(tmp_path, changed)).encode("a").tokens == [f"{SPACE}a", "</s>"]


def test_types_of_tokens_say_what_is_hidden_shown_and_not_there(tmp_path: Path) -> None:
    told = sentencepiece_vocabulary()
    told["tokenizer.ggml.tokens"] += ["<tool>", "[PAD1]"]
    told["tokenizer.ggml.token_type"] += [4, 5]
    told["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    ours = built(written(tmp_path, told))
    ids = ours.encode("a<tool>b</s><unk>", add_special_tokens=False).ids
    assert ours.decode(ids) == "a<tool> b" and len(ids) == 6
    assert ours.decode(ids, skip_special_tokens=False) == "a<tool> b</s><unk>"
    assert ours.token_to_id("[PAD1]") is None


def test_without_tokens_of_bytes_a_run_of_other_characters_is_unknown(tmp_path: Path) -> None:
    told = sentencepiece_vocabulary()
    for name in ("tokens", "token_type", "scores"):
        del told[f"tokenizer.ggml.{name}"][3:259]
    ours = built(written(tmp_path, told))
    found = ours.encode("a\U0001f44b\U0001f3fd?b", add_special_tokens=False).tokens
    assert found == [f"{SPACE}a", "<unk>", "b"]


def test_pairs_that_the_file_lists_go_before_scores(tmp_path: Path) -> None:
    told = sentencepiece_vocabulary(merges=[f"{SPACE} h", "l l", "ll o"])
    told["tokenizer.ggml.scores"] = [-1000.0] * len(told["tokenizer.ggml.tokens"])
    told["tokenizer.ggml.tokens"][-1] = "ll"
    found = built(written(tmp_path, told)).encode("hello", add_special_tokens=False).tokens
    assert found == [f"{SPACE}h", "e", "llo"]


class Counted(dict[str, float]):
    """Scores that count how often a token is looked up."""

    lookups = 0

    def __contains__(self, token: object) -> bool:
        self.lookups += 1
        return super().__contains__(token)


@pytest.mark.parametrize("num_tokens", [1 << 12, 1 << 15])
def test_pairs_are_found_with_two_lookups_a_character(num_tokens: int) -> None:
    letters = "abcdefgh"
    tokens = [
        "".join(letters[rank >> shift & 7] for shift in range(0, 15, 3))
        for rank in range(num_tokens)
    ]
    scores = Counted({token: -float(rank) for rank, token in enumerate([*letters, *tokens])})
    scores |= {token[:4]: -1e6 - rank for rank, token in enumerate(tokens[: num_tokens // 2])}
    pairs = pairs_by_score(scores)
    assert len(pairs) > num_tokens // 2
    assert scores.lookups <= 2 * sum(map(len, scores))


def test_pairs_of_one_token_follow_each_other_and_the_best_score_is_first() -> None:
    scores = {"a": -9.0, "b": -8.0, "ab": -2.0, "ba": -3.0, "aba": -1.0, "c": 0.0}
    expected = [("ab", "a"), ("a", "ba"), ("a", "b"), ("b", "a")]
    assert pairs_by_score(scores) == expected


def with_bytes_of_type(kind: int) -> list[int]:
    types: list[int] = sentencepiece_vocabulary()["tokenizer.ggml.token_type"]
    return [*types[:-3], *[kind] * 3] if kind == 6 else [*types[:3], kind, *types[4:]]


def changed_score(places: dict[int, float]) -> list[float]:
    scores: list[float] = sentencepiece_vocabulary()["tokenizer.ggml.scores"]
    return [places.get(at, score) for at, score in enumerate(scores)]


JOINED_IDS = [
    index
    for index, token in enumerate(sentencepiece_vocabulary()["tokenizer.ggml.tokens"])
    if token in (f"{SPACE}he", "lo")
]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "model",
            "t5",
            r"tokenizer\.ggml\.model: 't5' is not supported; supported are gpt2 .*llama",
        ),
        ("model", "bert", r"tokenizer\.ggml\.model: 'bert' is not supported"),
        ("pre", "llama-bpe", r"tokenizer\.ggml\.pre: 'llama-bpe' is not supported with Sent"),
        ("precompiled_charsmap", [1], r"precompiled_charsmap: this key is not known"),
        ("remove_extra_whitespaces", True, r"remove_extra_whitespaces: true is not supported"),
        ("add_sep_token", True, r"add_sep_token: true is not supported"),
        ("add_space_prefix", 1, r"add_space_prefix: 1 is not of type bool"),
        ("scores", None, r"tokenizer\.ggml\.scores is missing"),
        ("scores", [1.0], r"tokenizer\.ggml\.scores: 1 entries of type f for \d+ tokens"),
        ("scores", changed_score({JOINED_IDS[0]: float("nan")}), "scores: nan of .* is no finite"),
        ("scores", changed_score(dict.fromkeys(JOINED_IDS, -3.5)), "scores: .* have the same, -3"),
        ("token_type", with_bytes_of_type(1), "token_type: 255 tokens are of type 6"),
        ("token_type", with_bytes_of_type(6), "token_type: 259 tokens are of type 6"),
        ("token_type", with_bytes_of_type(7), "token_type: .7. are not supported"),
        ("bos_token_id", None, "add_bos_token: there is no tokenizer.ggml.bos_token_id"),
    ],
)
def test_what_would_change_the_tokens_is_refused_by_name(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    told = sentencepiece_vocabulary()
    told[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del told[f"tokenizer.ggml.{key}"]
    path = written(tmp_path, told)
    with pytest.raises(BadGguf, match=rf"^model\.gguf: .*{said}"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert name in CONTENTS and read_file(path, name)


@pytest.mark.parametrize(
    ("token", "kind", "said"),
    [
        ("erlo", 5, "'erlo' is unused and can be joined from others"),
        ("x" * (MAX_CHARACTERS + 1), 1, f"one has {MAX_CHARACTERS + 1} characters, more than"),
        ("lo", 1, "1 are there twice"),
    ],
)
def test_a_token_that_would_change_others_is_refused(
    token: str, kind: int, said: str, tmp_path: Path
) -> None:
    told = sentencepiece_vocabulary()
    told["tokenizer.ggml.tokens"].append(token)
    told["tokenizer.ggml.token_type"].append(kind)
    told["tokenizer.ggml.scores"].append(-5000.0)
    with pytest.raises(BadGguf, match=said):
        built(written(tmp_path, told))


def test_a_file_without_bytes_and_without_an_unknown_token_is_refused(tmp_path: Path) -> None:
    told = sentencepiece_vocabulary()
    del told["tokenizer.ggml.unknown_token_id"]
    for name in ("tokens", "token_type", "scores"):
        del told[f"tokenizer.ggml.{name}"][3:259]
    with pytest.raises(BadGguf, match=r"tokenizer\.ggml\.unknown_token_id is missing, and without"):
        built(written(tmp_path, told))
