"""tokenizer.json and tokenizer_config.json of a GGUF file, out of its metadata.

What differs between the kinds of tokenizers is in `byte_level` and `sentencepiece`; all other kinds
are refused.
"""

from typing import Any

from pagewire.gguf.byte_level import BYTE_LEVEL
from pagewire.gguf.header import GgufHeader
from pagewire.gguf.model_config import MORE_ENDS, SPECIAL_IDS, token_id_of
from pagewire.gguf.sentencepiece import SENTENCEPIECE
from pagewire.gguf.vocabulary import (
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    TokenizerKind,
)

TEMPLATE = "tokenizer.chat_template"
TOKENIZERS = {"gpt2": BYTE_LEVEL, "llama": SENTENCEPIECE}  # by GGUF's name

# Keys that decide nothing here, or that are read for all kinds.
INERT = frozenset(
    {"token_type_count", "cls_token_id", "mask_token_id", "seperator_token_id"}
    | {f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")}
    | {"prefix_token_id", "suffix_token_id", "middle_token_id"}
)
READ = frozenset(
    {"model", "tokens", "token_type", "add_bos_token", "add_eos_token"}
    | {*SPECIAL_IDS, *MORE_ENDS, "unknown_token_id"}
)


def tokenizer(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json. Raises BadGguf."""
    kind = _kind(header)
    vocabulary = _vocabulary(header, kind)
    parts = kind.parts(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocabulary),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(vocabulary, kind),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and chat templates."""
    kind = _kind(header)
    tokens = _vocabulary(header, kind).tokens
    prefix = header.require("general.architecture", str)
    ids = {
        name.removesuffix("_id"): token_id_of(header, key)
        for key, name in (SPECIAL_IDS | {"unknown_token_id": "unk_token_id"}).items()
    }
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.require(f"{prefix}.context_length", int),
        "add_bos_token": _adds(header, "bos", kind.adds_bos(header)),
        "add_eos_token": _adds(header, "eos", False),
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        "clean_up_tokenization_spaces": False,
    }
    templates = _templates(header)
    return content | ({"chat_template": templates} if templates else {})


def _kind(header: GgufHeader) -> TokenizerKind:
    """The file's, after a check of all that is said about the tokenizer."""
    model = header.require(f"{PREFIX}model", str)
    if model not in TOKENIZERS:
        known = ", ".join(f"{name} ({kind.description})" for name, kind in TOKENIZERS.items())
        header.refuse(f"{PREFIX}model: {model!r} is not supported; supported are {known}")
    kind = TOKENIZERS[model]
    read = READ | INERT | kind.keys | frozenset(kind.off)
    for key in header.metadata:
        is_known = key.startswith(TEMPLATE) or key.removeprefix(PREFIX) in read
        if key.startswith("tokenizer.") and not is_known:
            header.refuse(f"{key}: this key is not known, and it may change the tokens")
    for name in kind.off:
        if header.get(f"{PREFIX}{name}", bool, False):
            header.refuse(f"{PREFIX}{name}: true is not supported")
    return kind


def _vocabulary(header: GgufHeader, kind: TokenizerKind) -> GgufVocabulary:
    tokens: list[str] = header.require(f"{PREFIX}tokens", list)
    types: memoryview = header.require(f"{PREFIX}token_type", memoryview)
    if len(types) != len(tokens):
        header.refuse(f"{PREFIX}token_type: {len(types)} entries for {len(tokens)} tokens")
    if unknown := set(types) - {*kind.token_types}:
        known = kind.token_types
        header.refuse(f"{PREFIX}token_type: {sorted(unknown)} are not supported, only {known} are")
    if len(set(tokens)) != len(tokens):
        header.refuse(f"{PREFIX}tokens: {len(tokens) - len(set(tokens))} are there twice")
    respelled = kind.respelled(header, tokens)
    texts = [respelled.get(index, token) for index, token in enumerate(tokens)]
    return GgufVocabulary(header, texts, types, respelled.keys())


def _added(vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before anything else."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": index in vocabulary.normalized,
            "special": kind in (CONTROL, UNKNOWN),
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _post_processor(vocabulary: GgufVocabulary, kind: TokenizerKind) -> dict[str, Any] | None:
    """The tokens put before and after a text; None: nothing."""
    header = vocabulary.header
    around: dict[str, list[dict[str, Any]]] = {"bos": [], "eos": []}
    used = {}
    for name, default in (("bos", kind.adds_bos(header)), ("eos", False)):
        if _adds(header, name, default):
            token_id = token_id_of(header, f"{name}_token_id")
            if token_id is None:
                header.refuse(f"{PREFIX}add_{name}_token: there is no {PREFIX}{name}_token_id")
            token = vocabulary.tokens[token_id]
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
