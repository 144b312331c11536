"""Counts the lists and objects of a body before they are walked, and ends at the first error.

A validator makes an object of some hundred bytes for each wrong element. So every list of every
body stops at its first wrong one, and no list or object is looked into that has too many entries.
This is done to the schemas that the models have anyway: a field that is added later has it, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError, core_schema

from gateway.errors import limits

MAX_FIELDS = 512  # of an object whose fields have names
MAX_ALTERNATIVES = 128  # outputs of one prompt
MAX_ENTRIES = 1 << 16  # of a list or an object that has no entry here
MOST_ENTRIES: Mapping[str, int] = {
    "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS,
    "bad_words": limits.MAX_BAD_WORDS,
    "bad_words_token_ids": limits.MAX_BAD_TOKEN_SEQUENCES,
    "choice": limits.MAX_CHOICE_OPTIONS,
    "choices": MAX_ALTERNATIVES,
    "documents": limits.MAX_DOCUMENTS,
    "generate_responses": limits.MAX_PROMPTS,
    "guided_choice": limits.MAX_CHOICE_OPTIONS,
    "include": 64,
    "input": limits.MAX_PROMPT_IDS,
    "logit_bias": limits.MAX_LOGIT_BIASES,
    "logprob_token_ids": limits.MAX_LOGPROB_TOKEN_IDS,
    "metadata": 64,
    "prompt": limits.MAX_PROMPT_IDS,
    "prompt_token_ids": limits.MAX_PROMPT_IDS,
    "stop": limits.MAX_STOP_STRINGS,
    "stop_sequences": limits.MAX_STOP_STRINGS,
    "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
    "token_ids": limits.MAX_PROMPT_IDS,
    "tokens": limits.MAX_DETOKENIZE_IDS,
}
# Schemas that hold others, by the keys that these stand under.
_INNER = ("schema", "items_schema", "keys_schema", "values_schema", "choices")
_WALKING = frozenset({"list", "tuple", "set", "dict", "any", "function-plain"})


@dataclass(frozen=True, slots=True)
class Counted:
    """A validator that counts, and changes nothing."""

    most: int

    def __call__(self, value: Any) -> Any:
        """The value as it is. Raises PydanticCustomError for too many entries."""
        if isinstance(value, list | dict) and len(value) > self.most:
            context = {"count": len(value), "most": self.most}
            raise PydanticCustomError(
                "too_many", "{count} entries, at most {most} are allowed", context
            )
        return value


count_fields = Counted(MAX_FIELDS)


def bound(schema: dict[str, Any]) -> None:
    """Changes a model's schema as above."""
    for fields in _fields_of(schema):
        for name, field in fields.items():
            for inner in _below(field["schema"]):
                if inner["type"] == "list":
                    inner["fail_fast"] = True
            if any(inner["type"] in _WALKING for inner in _below(field["schema"])):
                _count(field, field.get("validation_alias", name))


def _fields_of(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of a model, within what else its schema says."""
    while schema["type"] != "model-fields":
        schema = schema["schema"]
    yield schema["fields"]


def _below(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it, up to other models, which are bounded by themselves."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _below(entry)
    elif isinstance(schema, tuple):  # a choice with its label
        yield from _below(schema[0])
    elif isinstance(schema, dict) and schema["type"] != "model":
        yield schema
        for key in _INNER:
            yield from _below(schema.get(key))


def _count(field: dict[str, Any], name: str) -> None:
    """Counts before all else; a default stays outermost, or the field would be required."""
    holder = field["schema"] if field["schema"]["type"] == "default" else field
    function = holder["schema"].get("function", {})
    if isinstance(function, dict) and isinstance(function.get("function"), Counted):
        return  # the same schema, once more
    counted = Counted(MOST_ENTRIES.get(name, MAX_ENTRIES))
    holder["schema"] = core_schema.no_info_before_validator_function(counted, holder["schema"])
