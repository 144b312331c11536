"""The converted model equals transformers' conversion of the same GGUF file."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from default_model import source

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "contractions": "I don't think they're here; we've SHOUTED 'TIS and don\u2019t",
    "digits": "In 1999, 3.14159 \u00d7 10^23 cost $1,000,000.00 (call 0800 123456)",
    "spaces": "  two   three\t\ttabs\n\n\nlines \r\n trailing   ",
    "nothing": "",
    "emoji": "👋🏽 family 👨‍👩‍👧‍👦 flag 🇫🇷 heart ❤️ end🙂",
    "chinese": "你好,世界。今天天气怎么样?",
    "scripts": "Привет мир, こんにちは世界, 안녕하세요, مرحبا, नमस्ते, שלום",
    "combining": "café naïve résumé Zürich Å",
    "code": "def f(x: int) -> list[int]:\n    return [i**2 for i in range(x)]  # squares\n",
    "web": "https://example.org/a?b=c&d=%20#e <div class='x'>&amp;</div>",
    "special": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <repo_name>x<file_sep>",
    "almost special": "<|im_start |> < |im_end|> <|im_sta",
    "controls": "a\x00b\x07c\x7fd\ufeffe\u200bf\u00a0g",
}


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """transformers reads the file anew for weights, configuration and tokenizer: 2 s each.

    A map of the file is slower to cut into pieces than an array. A table of the names of all
    tensors is made for each module, and none changes it.
    """

    @cache
    def read(path: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
            return reader(path)

    reader = gguf.GGUFReader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: read(str(path)))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="module")
def stored_by_gguf() -> tuple[str, str]:
    path = source.find().path
    return str(path.parent), path.name


@pytest.fixture(scope="module")
def oracle_tokenizer(stored_by_gguf: tuple[str, str]) -> Any:
    folder, name = stored_by_gguf
    return AutoTokenizer.from_pretrained(folder, gguf_file=name)


@pytest.fixture(scope="module")
def our_tokenizer(fresh_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(fresh_folder)


@pytest.mark.slow
def test_every_weight_equals_the_oracles(fresh_folder: Path) -> None:
    config = AutoConfig.from_pretrained(fresh_folder)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    checkpoint = load_gguf_checkpoint(source.find().path, True, skeleton)
    expected = checkpoint["tensors"]
    ours = load_file(fresh_folder / "model.safetensors")
    expected.pop("lm_head.weight", None)  # tied: the same tensor as the embedding

    assert ours.keys() == expected.keys()
    assert set(ours) == set(skeleton.state_dict()) - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, torch.as_tensor(expected[name])), name


def test_the_configuration_equals_the_oracles(
    fresh_folder: Path, stored_by_gguf: tuple[str, str]
) -> None:
    folder, name = stored_by_gguf
    ours = AutoConfig.from_pretrained(fresh_folder).to_dict()
    expected = AutoConfig.from_pretrained(folder, gguf_file=name).to_dict()

    assert isinstance(AutoConfig.from_pretrained(fresh_folder), LlamaConfig)
    # The file's float32 epsilon is the same number in float32, where it is used.
    assert torch.tensor(ours.pop("rms_norm_eps")) == torch.tensor(expected.pop("rms_norm_eps"))
    for only_there in ("_model_name_or_path", "_name_or_path", "unk_token_id", "dtype"):
        ours.pop(only_there, None)
        expected.pop(only_there, None)
    assert ours.pop("architectures") == ["LlamaForCausalLM"]
    expected.pop("architectures", None)
    assert ours == expected


@pytest.mark.parametrize("kind", TEXTS)
def test_text_becomes_the_same_ids_as_the_oracles_and_comes_back(
    kind: str, our_tokenizer: Any, oracle_tokenizer: Any
) -> None:
    ids = our_tokenizer(TEXTS[kind]).input_ids
    assert ids == oracle_tokenizer(TEXTS[kind]).input_ids
    assert our_tokenizer.decode(ids) == oracle_tokenizer.decode(ids) == TEXTS[kind]
    assert our_tokenizer.decode(ids, skip_special_tokens=True) == oracle_tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_numerals_of_every_script_stand_alone(our_tokenizer: Any, oracle_tokenizer: Any) -> None:
    # transformers ignores the file's `smollm` pre-tokenizer here, and joins the space and the
    # numeral.
    assert our_tokenizer.tokenize("x ²") == ["x", "Ġ", "Â²"]
    assert oracle_tokenizer.tokenize("x ²") == ["x", "ĠÂ", "²"]
    assert our_tokenizer.decode(our_tokenizer("x ½ Ⅷ ١٢").input_ids) == "x ½ Ⅷ ١٢"


@pytest.mark.parametrize("system", [None, "Answer in French."])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_chat_template_renders_as_the_oracles(
    system: str | None, add_generation_prompt: bool, our_tokenizer: Any, oracle_tokenizer: Any
) -> None:
    turns = [
        {"role": "user", "content": "Hi {{ braces }} 🙂"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye <|im_end|>"},
    ]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    ours = our_tokenizer.apply_chat_template(turns, **options)
    assert ours == oracle_tokenizer.apply_chat_template(turns, **options)
    assert ours.endswith("<|im_start|>assistant\n") is add_generation_prompt


def test_special_tokens_are_the_oracles(our_tokenizer: Any, oracle_tokenizer: Any) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(our_tokenizer, name) == getattr(oracle_tokenizer, name)
    ours, expected = (t.backend_tokenizer for t in (our_tokenizer, oracle_tokenizer))
    assert {i: str(t) for i, t in ours.get_added_tokens_decoder().items()} == {
        i: str(t) for i, t in expected.get_added_tokens_decoder().items()
    }
    assert ours.get_vocab() == expected.get_vocab()


def test_the_generation_ends_at_the_end_of_a_turn(fresh_folder: Path, our_tokenizer: Any) -> None:
    generation = json.loads((fresh_folder / "generation_config.json").read_text())
    assert our_tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == "<|im_end|>"


def test_the_model_answers_in_language(fresh_folder: Path, our_tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(fresh_folder)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = our_tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = our_tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
