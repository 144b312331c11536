"""tokenizer.json and tokenizer_config.json of a GGUF file, out of its metadata.

Byte-level BPE with the pre-tokenizers below. The file names its pre-tokenizer and does not define
it, so that any other name is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.gguf.header import GgufHeader
from pagewire.gguf.model_config import MORE_ENDS, SPECIAL_IDS, token_id_of

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
MODEL = "gpt2"  # GGUF's name of byte-level BPE
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
KINDS = (NORMAL, CONTROL, USER_DEFINED, UNUSED)

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# The pattern of GPT-2 is that of the library itself.
GPT2 = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut before its pieces are merged, and what else goes with it."""

    steps: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignores_merges: bool = False  # for a piece that is a token
    adds_bos: bool = False  # unless the file says otherwise


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((DIGITS, GPT2)),
    "qwen2": PreTokenizer((_split(WORDS.format(digits="")), BYTES), {"type": "NFC"}),
    "llama-bpe": PreTokenizer(
        (_split(WORDS.format(digits="{1,3}")), BYTES), ignores_merges=True, adds_bos=True
    ),
}

# Keys that decide nothing here, and those that must be False.
INERT = frozenset(
    {"scores", "token_type_count", "cls_token_id", "mask_token_id", "seperator_token_id"}
    | {f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")}
    | {"prefix_token_id", "suffix_token_id", "middle_token_id"}
)
OFF = ("add_sep_token", "add_space_prefix", "remove_extra_whitespaces")
READ = frozenset(
    {"model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token"}
    | {*SPECIAL_IDS, *MORE_ENDS, "unknown_token_id", *OFF}
)


def tokenizer(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json. Raises BadGguf."""
    pre = _pre_tokenizer(header)
    tokens, kinds = _tokens(header)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(index, token, kind)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": _post_processor(header, pre, tokens),
        "decoder": GPT2 | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignores_merges,
            "vocab": {
                token: index
                for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind != UNUSED
            },
            "merges": _merges(header),
        },
    }


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and chat templates."""
    tokens, _ = _tokens(header)
    prefix = header.require("general.architecture", str)
    ids = {
        name.removesuffix("_id"): token_id_of(header, key)
        for key, name in (SPECIAL_IDS | {"unknown_token_id": "unk_token_id"}).items()
    }
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.require(f"{prefix}.context_length", int),
        "add_bos_token": _adds(header, "bos", _pre_tokenizer(header).adds_bos),
        "add_eos_token": _adds(header, "eos", False),
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        "clean_up_tokenization_spaces": False,
    }
    templates = _templates(header)
    return content | ({"chat_template": templates} if templates else {})


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    """The file's, after a check of all that is said about the tokenizer."""
    model = header.require(f"{PREFIX}model", str)
    if model != MODEL:
        header.refuse(
            f"{PREFIX}model: {model!r} is not supported, only {MODEL!r} (byte-level BPE) is"
        )
    for key in header.metadata:
        is_known = key.startswith(TEMPLATE) or key.removeprefix(PREFIX) in READ | INERT
        if key.startswith("tokenizer.") and not is_known:
            header.refuse(f"{key}: this key is not known, and it may change the tokens")
    for name in OFF:
        if header.get(f"{PREFIX}{name}", bool, False):
            header.refuse(f"{PREFIX}{name}: true is not supported")
    pre = header.require(f"{PREFIX}pre", str)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        header.refuse(f"{PREFIX}pre: {pre!r} is not supported; supported are {known}")
    return PRE_TOKENIZERS[pre]


def _tokens(header: GgufHeader) -> tuple[list[str], memoryview]:
    """The text of each id, and its kind."""
    tokens: list[str] = header.require(f"{PREFIX}tokens", list)
    kinds: memoryview = header.require(f"{PREFIX}token_type", memoryview)
    if len(kinds) != len(tokens):
        header.refuse(f"{PREFIX}token_type: {len(kinds)} entries for {len(tokens)} tokens")
    if unknown := set(kinds) - {*KINDS}:
        header.refuse(f"{PREFIX}token_type: {sorted(unknown)} are not supported, only {KINDS} are")
    if len(set(tokens)) != len(tokens):
        header.refuse(f"{PREFIX}tokens: {len(tokens) - len(set(tokens))} are there twice")
    return tokens, kinds


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges = []
    for merge in header.require(f"{PREFIX}merges", list):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def _added(index: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == CONTROL,
    }


def _post_processor(
    header: GgufHeader, pre: PreTokenizer, tokens: list[str]
) -> dict[str, Any] | None:
    """What is put before and after a text; None: nothing."""
    around: dict[str, list[dict[str, Any]]] = {"bos": [], "eos": []}
    used = {}
    for name, default in (("bos", pre.adds_bos), ("eos", False)):
        if _adds(header, name, default):
            token_id = token_id_of(header, f"{name}_token_id")
            if token_id is None:
                header.refuse(f"{PREFIX}add_{name}_token: there is no {PREFIX}{name}_token_id")
            token = tokens[token_id]
            around[name] = [{"SpecialToken": {"id": token, "type_id": 0}}]
            used[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    if not used:
        return None
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    one = [*around["bos"], text, *around["eos"]]
    two = [*one, *around["bos"], second, *around["eos"]]
    return {"type": "TemplateProcessing", "single": one, "pair": two, "special_tokens": used}


def _adds(header: GgufHeader, name: str, default: bool) -> bool:
    return bool(header.get(f"{PREFIX}add_{name}_token", bool, default))


def _templates(header: GgufHeader) -> str | list[dict[str, str]] | None:
    """The chat template, or several by name."""
    default: str | None = header.get(TEMPLATE, str)
    named = {
        key.removeprefix(f"{TEMPLATE}."): header.require(key, str)
        for key in header.metadata
        if key.startswith(f"{TEMPLATE}.")
    }
    if not named:
        return default
    if default is not None:
        named = {"default": default} | named
    return [{"name": name, "template": template} for name, template in named.items()]
