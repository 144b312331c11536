"""tekken.json, the tokenizer of Mistral's models: tokens with ranks, their pattern and controls.

Ids are those of the controls first, which `default_num_special_tokens` counts, and then ranks. A
file without names for them is one of the first versions, whose names are known.
"""

import base64
import binascii
import json
from typing import Any

from pagewire.ranks.byte_pairs import BadRanks, ControlToken, RankedVocabulary

FILE = "tekken.json"
# Of files that name none: control tokens in order, up to version 7.
OLD_VERSIONS = ("v1", "v2", "v3", "v7")
OLD_CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
BEGIN, END = "<s>", "</s>"
NAMED = {"bos_token": BEGIN, "eos_token": END, "unk_token": "<unk>", "pad_token": "<pad>"}


def tokenizer(content: bytes) -> dict[str, Any]:
    """The content of tokenizer.json. Raises BadRanks."""
    file = _parsed(content)
    size, num_controls = (
        _number(file, name) for name in ("default_vocab_size", "default_num_special_tokens")
    )
    controls = _controls(file, num_controls)
    vocabulary = RankedVocabulary(
        _ranks(file, size - num_controls),
        first_id=num_controls,
        pattern=_config(file, "pattern", str),
        controls=controls,
        begins_with=BEGIN if any(one.text == BEGIN for one in controls) else None,
    )
    return vocabulary.definition()


def tokenizer_config(content: bytes) -> dict[str, Any]:
    """The content of tokenizer_config.json: the special tokens by name. Raises BadRanks."""
    file = _parsed(content)
    known = {one.text for one in _controls(file, _number(file, "default_num_special_tokens"))}
    return {name: text for name, text in NAMED.items() if text in known}


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        file = json.loads(content)
    except ValueError as error:
        raise BadRanks(f"{FILE} is not JSON: {error}") from error
    if not isinstance(file, dict) or not isinstance(file.get("config"), dict):
        raise BadRanks(f"{FILE} has no object `config`")
    return file


def _config(file: dict[str, Any], name: str, kind: type) -> Any:
    value = file["config"].get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRanks(f"{FILE}: config.{name} is no {kind.__name__}")
    return value


def _number(file: dict[str, Any], name: str) -> int:
    number: int = _config(file, name, int)
    if number < 0:
        raise BadRanks(f"{FILE}: config.{name} is {number}")
    return number


def _controls(file: dict[str, Any], count: int) -> tuple[ControlToken, ...]:
    """The control tokens; those without a name of their own are called by their number."""
    given = file.get("special_tokens")
    if given is None:
        version = _config(file, "version", str)
        if version not in OLD_VERSIONS:
            raise BadRanks(f"{FILE} of version {version} has no special_tokens")
        named = {at: ControlToken(at, text) for at, text in enumerate(OLD_CONTROLS)}
    else:
        try:
            named = {
                one["rank"]: ControlToken(one["rank"], one["token_str"], one["is_control"])
                for one in given
            }
        except (TypeError, KeyError) as error:
            raise BadRanks(f"{FILE}: special_tokens lack {error}") from error
    if len(named) > count or any(at not in range(count) for at in named):
        raise BadRanks(f"{FILE}: special_tokens are not within the first {count} ids")
    return tuple(named.get(at, ControlToken(at, f"<SPECIAL_{at}>")) for at in range(count))


def _ranks(file: dict[str, Any], count: int) -> dict[bytes, int]:
    """The tokens of the first ranks, all of which there must be."""
    vocab = file.get("vocab")
    if not isinstance(vocab, list):
        raise BadRanks(f"{FILE} has no list `vocab`")
    try:
        ranks = {
            base64.b64decode(one["token_bytes"], validate=True): one["rank"]
            for one in vocab
            if one["rank"] < count
        }
    except (TypeError, KeyError, binascii.Error) as error:
        raise BadRanks(f"{FILE}: vocab has an entry that is none: {error}") from error
    check_ranks(FILE, ranks, count)
    return ranks


def check_ranks(name: str, ranks: dict[bytes, int], count: int) -> None:
    """Raises BadRanks unless each rank below a number has a token, and each byte is one."""
    if sorted(ranks.values()) != list(range(count)):
        raise BadRanks(f"{name}: not every rank below {count} has one token")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise BadRanks(f"{name}: the byte {missing[0]} is no token")
