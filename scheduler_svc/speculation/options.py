"""The option --speculative-config: JSON with the keys that vLLM uses, as far as they are here."""

import argparse
import json
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

MAX_DRAFTED = 32  # tokens of one draft


class Method(Enum):
    """The source of drafts: a request's own tokens, or a second model."""

    NGRAM = "ngram"  # what followed the last tokens the last time they occurred
    SUFFIX = "suffix"  # what mostly followed them, for as long as that is likely
    DRAFT_MODEL = "draft_model"  # what the worker's draft model says


_METHODS = ", ".join(method.value for method in Method)
_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "whole number"),
    float: ((int, float), "number"),
    str: (str, "text"),
}
_OWN_KEYS = {
    Method.NGRAM: ("prompt_lookup_min", "prompt_lookup_max"),
    Method.SUFFIX: (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "suffix_decoding_max_cached_requests",
    ),
    Method.DRAFT_MODEL: ("model",),
}


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The source of drafts, and how many at most. Raises ValueError, naming the key."""

    method: Method
    num_speculative_tokens: int = 4
    model: str = ""  # as the worker's --draft-model names it; empty: any that it has
    prompt_lookup_min: int = 2  # tokens that must agree
    prompt_lookup_max: int = 8  # tokens that are compared
    suffix_decoding_max_tree_depth: int = 24  # tokens that are compared
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token that agrees
    suffix_decoding_min_token_prob: float = 0.1  # of each draft, as far as counted
    suffix_decoding_max_cached_requests: int = 0  # that have ended, to draft from; 0: none
    disable_by_batch_size: int = 0  # rows from which nothing is drafted; 0: measured cost decides

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTED:
            _refuse(f"num_speculative_tokens must be 1 to {MAX_DRAFTED}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            _refuse("prompt_lookup_min must be 1 to prompt_lookup_max")
        if self.suffix_decoding_max_tree_depth < 1:
            _refuse("suffix_decoding_max_tree_depth must be at least 1")
        if not self.suffix_decoding_max_spec_factor > 0:
            _refuse("suffix_decoding_max_spec_factor must be above 0")
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            _refuse("suffix_decoding_min_token_prob must be 0 to 1")
        if self.suffix_decoding_max_cached_requests < 0:
            _refuse("suffix_decoding_max_cached_requests must not be negative")
        if self.disable_by_batch_size < 0:
            _refuse("disable_by_batch_size must not be negative")


def add_speculation_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option to a parser."""
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="draft tokens that a request's own ones or a second model predict, and verify several "
        'in a step; an object such as {"method": "ngram", "num_speculative_tokens": 4}; outputs '
        "stay the same, but for near ties on CUDA in 16 bits: docs/equal-tokens.md",
    )


def take_speculation(options: dict[str, Any]) -> SpeculationOptions | None:
    """The parsed option; None: nothing is drafted. Raises ValueError, naming the key."""
    text = options["speculative_config"]
    return None if text is None else parse_speculation(text)


def parse_speculation(text: str) -> SpeculationOptions:
    """The options in a JSON object. Raises ValueError, naming what is not here."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        _refuse(f"not JSON: {error}")
    if not isinstance(given, dict):
        _refuse("not a JSON object")
    given = {key: value for key, value in given.items() if value is not None}
    method = _method(given.pop("method", None))
    foreign = {key for other, keys in _OWN_KEYS.items() if other is not method for key in keys}
    known = {field.name: field for field in fields(SpeculationOptions)}
    for key, value in given.items():
        if key not in known or key in foreign:
            own = sorted(known.keys() - foreign)
            _refuse(f"{key!r} is not there with method {method.value}; there are {', '.join(own)}")
        _check_type(key, value, known[key].type)
    if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
        default = SpeculationOptions.__dataclass_fields__["prompt_lookup_min"].default
        given["prompt_lookup_min"] = min(default, given["prompt_lookup_max"])
    return SpeculationOptions(method, **given)


def _method(name: Any) -> Method:
    if name is None:
        _refuse(f"method is missing; there are {_METHODS}")
    if name not in [method.value for method in Method]:
        _refuse(
            f"method {name!r} is not there; there are {_METHODS}, which need no trained heads and "
            "no tree"
        )
    return Method(name)


def _check_type(key: str, value: Any, wanted: Any) -> None:
    kinds, name = _KINDS[wanted]
    if isinstance(value, bool) or not isinstance(value, kinds):
        _refuse(f"{key} is {value!r}, must be a {name}")


def _refuse(why: str) -> Any:
    raise ValueError(f"speculative_config: {why}")
