"""Converts the tokenizer in a GGUF file to tokenizer.json and tokenizer_config.json.

It supports one family: byte-level BPE with the pre-tokenizer that GGUF calls `smollm`.
"""

from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from default_model.llama import special_ids, value
from default_model.source import DefaultModelError

_EXPECTED = {"model": "gpt2", "pre": "smollm", "add_bos_token": False, "add_space_prefix": False}
_NORMAL, _CONTROL = 1, 3


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer; its control tokens are special and found before any splitting."""
    for key, expected in _EXPECTED.items():
        found = value(reader, f"tokenizer.ggml.{key}")
        if found != expected:
            raise DefaultModelError(f"tokenizer.ggml.{key} {found!r} is not supported")
    tokens: list[str] = value(reader, "tokenizer.ggml.tokens")
    types: list[int] = value(reader, "tokenizer.ggml.token_type")
    unknown = set(types) - {_NORMAL, _CONTROL}
    if unknown or len(types) != len(tokens):
        raise DefaultModelError(
            f"tokenizer.ggml.token_type has kinds {sorted(unknown)} and {len(types)} entries for "
            f"{len(tokens)} tokens"
        )
    built = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in value(reader, "tokenizer.ggml.merges")],
        )
    )
    # `smollm`: every numeral stands alone, then the pattern of GPT-2.
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return built


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens: list[str] = value(reader, "tokenizer.ggml.tokens")
    ids = special_ids(reader)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(value(reader, "llama.context_length")),
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(value(reader, "tokenizer.ggml.unknown_token_id"))],
        "clean_up_tokenization_spaces": False,
        "chat_template": value(reader, "tokenizer.chat_template"),
    }


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
