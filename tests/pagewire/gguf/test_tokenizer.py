"""A GGUF file's tokenizer gives the ids of the tokenizers that transformers would build."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.pre_tokenizers import Split
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from default_model import source
from pagewire.gguf.byte_level import PRE_TOKENIZERS
from pagewire.gguf.files import CONTENTS, read_file
from pagewire.gguf.header import BadGguf, read_header
from tests.gguf_files import TEMPLATE, GgufFile, tiny_file

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "contractions": "I don't think they're here; we've SHOUTED 'TIS and don\u2019t I'LL",
    "digits": "In 1999, 3.14159 \u00d7 10^23 cost $1,000,000.00 (call 0800 123456) x ² ½ Ⅷ ١٢",
    "spaces": "  two   three\t\ttabs\n\n\nlines \r\n trailing   ",
    "nothing": "",
    "emoji": "👋🏽 family 👨‍👩‍👧‍👦 flag 🇫🇷 heart ❤️ end🙂",
    "chinese": "你好,世界。今天天气怎么样?",
    "scripts": "Привет мир, こんにちは世界, 안녕하세요, مرحبا, नमस्ते, שלום",
    "combining": "cafe\u0301 na\u00efve A\u030a",
    "special": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <repo_name>x<file_sep>",
    "almost special": "<|im_start |> < |im_end|> <|im_sta",
    "controls": "a\x00b\x07c\x7fd\ufeffe\u200bf\u00a0g",
}


def built(file: GgufFile, folder: Path) -> tokenizers.Tokenizer:
    content = read_file(file.write(folder / "model.gguf"), "tokenizer.json")
    assert content is not None
    return tokenizers.Tokenizer.from_str(content.decode())


def with_real_vocabulary(pre: str) -> GgufFile:
    """The default model's vocabulary and merges, under another pre-tokenizer."""
    real = read_header(source.find().path).metadata

    def edit(file: GgufFile) -> None:
        for key in ("tokens", "token_type", "merges"):
            name = f"tokenizer.ggml.{key}"
            found = real[name]
            file.metadata[name] = list(found) if isinstance(found, memoryview) else found
        file.metadata["tokenizer.ggml.pre"] = pre
        num_tokens = len(file.metadata["tokenizer.ggml.tokens"])
        assert num_tokens == 49152

    return tiny_file(edit)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[tokenizers.Tokenizer, Any]:
    """Ours, and transformers' own tokenizer of Qwen2, of one vocabulary."""
    file = with_real_vocabulary("qwen2")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    theirs.add_special_tokens({"additional_special_tokens": control})
    return built(file, tmp_path_factory.mktemp("qwen")), theirs


@pytest.mark.parametrize("kind", TEXTS)
def test_qwen2_splits_text_as_transformers_does(
    kind: str, qwen: tuple[tokenizers.Tokenizer, Any]
) -> None:
    ours, theirs = qwen
    ids = ours.encode(TEXTS[kind]).ids
    assert ids == theirs(TEXTS[kind]).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_llama_bpe_splits_text_by_transformers_pattern() -> None:
    split, in_bytes = PRE_TOKENIZERS["llama-bpe"].steps
    assert split["pattern"]["Regex"] == TikTokenConverter(vocab_file="").pattern
    assert in_bytes["use_regex"] is False


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "lfm2", "llama-bpe", "smaug-bpe", "gpt-4o"])
def test_patterns_are_those_that_transformers_splits_by(pre: str) -> None:
    split, in_bytes = PRE_TOKENIZERS[pre].steps
    assert split["pattern"]["Regex"] == GGUF_PRE_TOKENIZER_SPLITS[pre]
    assert in_bytes["use_regex"] is False


def test_gpt_4o_cuts_words_where_capitals_begin() -> None:
    pre = PRE_TOKENIZERS["gpt-4o"].steps[0]["pattern"]["Regex"]
    split = Split(tokenizers.Regex(pre), "isolated")
    text = "HTTPServer isn't /tmp/a\n\nNow12345 HE'LL caf\u00e9s  x"
    pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    assert pieces == [
        *("HTTPServer", " isn't", " /", "tmp", "/a", "\n\n", "Now", "123", "45"),
        *(" HE'LL", " caf\u00e9s", " ", " x"),
    ]


def test_a_whole_token_of_gpt_4o_is_not_merged_and_no_text_begins_with_one(tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata["tokenizer.ggml.pre"] = "gpt-4o"
        del file.metadata["tokenizer.ggml.add_bos_token"]
        tokens = file.metadata["tokenizer.ggml.tokens"]
        tokens[tokens.index("ab")] = "xyz"  # which no merge makes
        tokens[-2] = "xy"
        file.metadata["tokenizer.ggml.merges"] = ["x y"]

    assert built(tiny_file(edit), tmp_path).encode("xyz").tokens == ["xyz"]


def test_llama_bpe_begins_a_text_and_takes_whole_tokens_before_merges(tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata["tokenizer.ggml.pre"] = "llama-bpe"
        del file.metadata["tokenizer.ggml.add_bos_token"]
        tokens = file.metadata["tokenizer.ggml.tokens"]
        tokens[tokens.index("ab")] = "xyz"  # which no merge makes
        file.metadata["tokenizer.ggml.merges"] = []

    file = tiny_file(edit)
    file.metadata["tokenizer.ggml.merges"] = ["x y"]
    file.metadata["tokenizer.ggml.tokens"][-2] = "xy"
    ours = built(file, tmp_path)
    assert ours.encode("xyz").tokens == ["<|im_start|>", "xyz"]
    assert ours.encode("xyz", add_special_tokens=False).tokens == ["xyz"]
    assert ours.encode("xyy", add_special_tokens=False).tokens == ["xy", "y"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("kind", [k for k in TEXTS if k != "combining"])
def test_every_text_comes_back(pre: str, kind: str, tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata["tokenizer.ggml.pre"] = pre

    ours = built(tiny_file(edit), tmp_path)
    ids = ours.encode(TEXTS[kind], add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == TEXTS[kind]


def test_user_defined_tokens_are_found_and_shown_and_unused_ones_are_not_there(
    tmp_path: Path,
) -> None:
    def edit(file: GgufFile) -> None:
        kinds = file.metadata["tokenizer.ggml.token_type"]
        tokens = file.metadata["tokenizer.ggml.tokens"]
        tokens[-2:], kinds[-2:] = ["<think>", "[PAD259]"], [4, 5]
        file.metadata["tokenizer.ggml.merges"] = ["a b"]
        tokens[-3] = "ab"

    ours = built(tiny_file(edit), tmp_path)
    ids = ours.encode("a<think>b<|im_end|>[PAD259]").ids
    assert ours.id_to_token(ids[1]) == "<think>" and ours.token_to_id("[PAD259]") is None
    assert ours.decode(ids) == "a<think>b[PAD259]"  # special tokens are hidden


def test_ends_of_turns_end_an_output_and_sampling_defaults_are_read(tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata |= {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
        file.metadata |= {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}

    path = tiny_file(edit).write(tmp_path / "model.gguf")
    content = json.loads(read_file(path, "generation_config.json") or b"")
    expected = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert content == expected | {"temperature": 0.6, "top_k": 20}


def test_an_end_that_is_no_id_of_a_token_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata |= {"tokenizer.ggml.eot_token_id": 260, "tokenizer.ggml.eom_token_id": 3}
        file.metadata |= {"tokenizer.ggml.padding_token_id": 2**32 - 1}  # how "none" is written

    path = tiny_file(edit).write(tmp_path / "model.gguf")
    content = json.loads(read_file(path, "generation_config.json") or b"")
    assert content == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert "tokenizer.ggml.eot_token_id: 260 is no id of 260 tokens" in caplog.text
    assert "pad_token" not in json.loads(read_file(path, "tokenizer_config.json") or b"")


def test_chat_templates_come_by_name(tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata["tokenizer.chat_template.tool_use"] = "tools"

    path = tiny_file(edit).write(tmp_path / "model.gguf")
    content = json.loads(read_file(path, "tokenizer_config.json") or b"")
    found = {each["name"]: each["template"] for each in content["chat_template"]}
    assert found == {"default": TEMPLATE, "tool_use": "tools"}
    assert (content["bos_token"], content["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "t5", "tokenizer.ggml.model: .t5. is not supported; supported are gpt2"),
        ("pre", "tekken", "'tekken' is not supported; supported are gpt-2, smollm, qwen2, qwen35"),
        ("pre", "default", "tokenizer.ggml.pre: 'default' is not supported"),
        ("add_space_prefix", True, "tokenizer.ggml.add_space_prefix: true is not supported"),
        ("a_new_key", 1, "tokenizer.ggml.a_new_key: this key is not known"),
        ("bos_token_id", 5000, "tokenizer.ggml.bos_token_id: 5000 is no id of 260 tokens"),
        ("token_type", [1, 1], "tokenizer.ggml.token_type: 2 entries for 260 tokens"),
        ("token_type", [6] * 260, "tokenizer.ggml.token_type: .6. are not supported"),
        ("tokens", ["a"] * 260, "tokenizer.ggml.tokens: 259 are there twice"),
        ("merges", None, "tokenizer.ggml.merges is missing"),
        ("pre", None, "tokenizer.ggml.pre is missing"),
    ],
)
def test_what_would_change_the_tokens_is_refused_by_name(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del file.metadata[f"tokenizer.ggml.{key}"]

    path = tiny_file(edit).write(tmp_path / "model.gguf")
    with pytest.raises(BadGguf, match=rf"^model\.gguf: .*{said}"):
        for name in CONTENTS:
            read_file(path, name)
