"""Folders with tekken.json or tiktoken.model in place of tokenizer.json, against tiktoken."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.conversation import Conversation, Message
from gateway.process.config import parse_args
from gateway.tokens.tokenizer import Tokenizer, TokenizerFolderError
from pagewire.gguf.files import read_file
from pagewire.ranks import files
from tests import ranked
from wire.grammar import new_matcher, read_vocabulary

# The patterns as their families publish them.
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
NUM_CONTROLS = 30
NUM_RANKS = len(ranked.ranks())
END = NUM_RANKS + 2
TEXTS = ["", " ", "a", ranked.TEXT, ranked.TEXT[::-1], "aaaaaaaaaaaaa", "=-" * 9 + "\r\n\r\n\t "]
TEXTS += [
    (ranked.TEXT * 40)[:10_000],
    "\u0000\u200b\ufeff",
    "'S '\u017f I'LL",
    "1234567",
    "  \n  \n ",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("tekken", "tiktoken")}
    file = ranked.tekken(TEKKEN_PATTERN, num_controls=NUM_CONTROLS)
    (made["tekken"] / "tekken.json").write_text(json.dumps(file))
    (made["tekken"] / "chat_template.jinja").write_text(TEMPLATE)
    (made["tiktoken"] / "tiktoken.model").write_bytes(ranked.tiktoken_model())
    config = ranked.kimi_config(im_end=END, im_user=NUM_RANKS + 3)
    (made["tiktoken"] / "tokenizer_config.json").write_bytes(config)
    return made


@pytest.fixture(scope="module")
def read(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


def oracles() -> dict[str, tuple[tiktoken.Encoding, int]]:
    """The same by the library that the families' own programs use, and the first id."""
    used = {token: rank for token, rank in ranked.ranks().items() if rank < NUM_RANKS - 20}
    return {
        "tekken": (_encoding(TEKKEN_PATTERN, used), NUM_CONTROLS),
        "tiktoken": (_encoding(KIMI_PATTERN, ranked.ranks()), 0),
    }


def _encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("o", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


ORACLES = oracles()


async def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return await tokenizer.encode("prompt", text, add_special_tokens=False)


@pytest.mark.parametrize("name", ORACLES)
async def test_texts_have_the_ids_that_their_ranks_give(
    read: dict[str, Tokenizer], name: str
) -> None:
    oracle, first = ORACLES[name]
    for text in TEXTS:
        expected = [first + rank for rank in oracle.encode(text, disallowed_special=())]
        token_ids = await ids(read[name], text)
        assert token_ids == expected, text[:40]
        assert read[name].decode(token_ids, skip_special_tokens=False) == text
        detokenizer = read[name].detokenizer(skip_special_tokens=True)
        assert "".join(detokenizer.push([one]) for one in token_ids) + detokenizer.flush() == text


@given(st.text(st.sampled_from(sorted({*ranked.TEXT, *"aA '=\n\t0"})), max_size=60))
def test_any_text_has_them(read: dict[str, Tokenizer], text: str) -> None:
    for name, (oracle, first) in ORACLES.items():
        expected = [first + rank for rank in oracle.encode(text, disallowed_special=())]
        assert read[name]._encode(text, add_special_tokens=False) == expected


async def test_control_tokens_have_their_ids_and_are_not_shown(read: dict[str, Tokenizer]) -> None:
    assert await ids(read["tekken"], "[INST]a[/INST]</s><SPECIAL_29>") == [3, 30 + 64, 4, 2, 29]
    kimi = await ids(read["tiktoken"], "<|im_end|><|im_user|>")
    assert kimi == [END, END + 1]
    assert read["tiktoken"].decode(kimi, skip_special_tokens=True) == ""
    assert (await ids(read["tiktoken"], f"<|reserved_token_{NUM_RANKS + 9}|>"))[0] == NUM_RANKS + 9
    assert read["tekken"].vocab_size == NUM_CONTROLS + NUM_RANKS - 20
    assert read["tiktoken"].vocab_size == NUM_RANKS + 256


async def test_a_prompt_of_mistrals_begins_with_its_token_and_a_chat_has_its_templates(
    read: dict[str, Tokenizer],
) -> None:
    begun = await read["tekken"].encode("prompt", "a", add_special_tokens=True)
    assert begun == [1, *await ids(read["tekken"], "a")]
    chat = Conversation((Message("user", "a"),))
    assert read["tekken"].render(chat) == "<s>[INST]a[/INST]"
    assert await read["tiktoken"].encode("prompt", "a", add_special_tokens=True) == await ids(
        read["tiktoken"], "a"
    )


@pytest.mark.parametrize("name", ORACLES)
async def test_gateway_and_worker_read_the_same_tokenizer_and_grammars_its_bytes(
    folders: dict[str, Path], read: dict[str, Tokenizer], name: str
) -> None:
    content = read_file(folders[name], "tokenizer.json")  # as the worker does
    assert content is not None
    assert hashlib.sha256(content).hexdigest() == read[name].sha256
    end = 2 if name == "tekken" else END
    vocabulary = read_vocabulary(content.decode(), read[name].vocab_size, [end])
    matcher = new_matcher(vocabulary, '%llguidance {}\nstart: "x" /é[0-9]+世?/')
    assert matcher.try_consume_tokens(await ids(read[name], "xé12世")) > 0
    assert matcher.is_accepting()
    refused = new_matcher(vocabulary, '%llguidance {}\nstart: "x" /é[0-9]+/')
    assert refused.try_consume_tokens(await ids(read[name], "xé世")) < len("xé世".encode())
    common = ["--model", str(folders[name]), "--scheduler", "127.0.0.1:1"]
    assert parse_args(common).model == folders[name]


def test_a_tokenizer_json_comes_first(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in ("tekken.json", "tiktoken.model"):
        (tmp_path / file).write_text("broken")
    (tmp_path / "tokenizer.json").write_bytes(read_file(folders["tekken"], "tokenizer.json") or b"")
    Tokenizer.from_folder(tmp_path)
    assert files.read(tmp_path, "config.json") is None


def _without(file: dict[str, Any], *path: str) -> dict[str, Any]:
    copy = json.loads(json.dumps(file))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return copy


def _with_config(**values: Any) -> dict[str, Any]:
    file = ranked.tekken(TEKKEN_PATTERN)
    return file | {"config": file["config"] | values}


BROKEN: list[tuple[Any, str]] = [
    ([], "no object `config`"),
    (_without(ranked.tekken("a"), "vocab"), "no list `vocab`"),
    (_without(ranked.tekken("a"), "config", "pattern"), "config.pattern is no str"),
    (_with_config(default_vocab_size=True), "config.default_vocab_size is no int"),
    (_with_config(default_num_special_tokens=-1), "config.default_num_special_tokens is -1"),
    (_with_config(default_num_special_tokens=3), "not within the first 3 ids"),
    (_with_config(version="v13"), "version v13 has no special_tokens"),
    (_with_config(default_vocab_size=99_999), "not every rank below 99969 has one token"),
    (_with_config(default_vocab_size=100), "the byte .* is no token"),
    (ranked.tekken("a", special_tokens=[{"rank": 0}]), "special_tokens lack"),
    (ranked.tekken("a", vocab=[{"rank": 0, "token_bytes": "?"}]), "an entry that is none"),
    (
        ranked.tekken("a", special_tokens=[{"rank": 0, "token_str": "a", "is_control": True}]),
        "has the text of the control 'a'",
    ),
    (ranked.tekken("(a"), "is no tokenizer"),
]


@pytest.mark.parametrize(("file", "why"), BROKEN, ids=range(len(BROKEN)))
def test_a_tekken_json_that_cannot_be_read_is_refused_by_its_field(
    file: Any, why: str, tmp_path: Path
) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    with pytest.raises(TokenizerFolderError, match=why):
        Tokenizer.from_folder(tmp_path)


def test_its_own_control_tokens_have_their_own_flags(tmp_path: Path) -> None:
    tokens = [{"rank": 0, "token_str": "<s>", "is_control": True}]
    tokens += [{"rank": 2, "token_str": "[THINK]", "is_control": False}]
    file = ranked.tekken(TEKKEN_PATTERN, special_tokens=tokens)
    file["config"]["version"] = "v13"
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == "[THINK]"
    assert tokenizer.markers()[1] == (2,)


@pytest.mark.parametrize(
    ("model", "config", "why"),
    [
        (ranked.tiktoken_model(), b"{}", "does not name TikTokenTokenizer of tokenization_kimi"),
        (ranked.tiktoken_model(), b'{"tokenizer_class": "TikTokenTokenizer"}', "auto_map"),
        (ranked.tiktoken_model(), b"{", "is not JSON"),
        (b"YQ== x\n", ranked.kimi_config(), "line 1 is no token and rank"),
        (b"YQ== 1\n", ranked.kimi_config(), "not every rank below 1"),
        (ranked.tiktoken_model(), ranked.kimi_config(a=5), "has an id below"),
    ],
)
def test_a_tiktoken_model_whose_pattern_is_not_known_is_refused(
    model: bytes, config: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerFolderError, match=why):
        Tokenizer.from_folder(tmp_path)
