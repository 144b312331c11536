"""Random walks through grammars: every output that the masks allow matches its schema.

A model rarely samples unlikely tokens; random walks do. Every output is read by a JSON parser and
checked by another implementation of JSON Schema.
"""

import json
import os
import random
from typing import Any

import jsonschema
import pytest
import tokenizers

from default_model.folder import ensure
from gateway.structure.structure import JsonSchema
from tests.gateway.structure.walks import walk
from tests.schemas import make_schema
from wire.grammar import Vocabulary, new_matcher, read_vocabulary

VOCAB_SIZE, EOS = 49152, 2
MAX_TOKENS = 600
NUM_RANDOM = 200 if os.environ.get("PAGEWIRE_ALL_SCHEMAS") else 100

# Unbounded and corner cases that the random schemas exclude, since a walk must end.
CORNERS: list[Any] = [
    {"type": "object"},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    {"type": "object", "properties": {"a\nb": {"const": 'é"\\/\t'}}, "required": ["a\nb"]},
    {"type": "object", "properties": {"abc": {"type": "null"}, "ab": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "null"}}},
    {
        "$defs": {"tree": {"type": "object", "properties": {"sub": {"$ref": "#/$defs/tree"}}}},
        "$ref": "#/$defs/tree",
        "additionalProperties": False,
    },
    {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"required": ["a"]}], "type": "object"},
    {"anyOf": [{"type": "string", "pattern": "[0-9]$"}, {"type": "array", "items": False}]},
    {"type": "number", "exclusiveMinimum": 0.1, "maximum": 0.25},
    {"type": ["number", "string"], "minLength": 2, "minimum": -3.5},
    {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "string", "maxLength": 2}},
    {"type": "string", "pattern": "^(\\w{2}|\\s)+$", "minLength": 3, "maxLength": 6},
    {"enum": ["a", "ab", "abc", 1, 12, None, [], {"a": []}]},
    True,
]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ensure() / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return read_vocabulary(tokenizer.to_str(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def closing(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Tokens that bring an output closer to its end."""
    return [EOS, *(tokenizer.token_to_id(character) for character in '"}],0123456789')]


@pytest.mark.parametrize(
    ("schemas", "num_walks"),
    [
        pytest.param([make_schema(seed) for seed in range(NUM_RANDOM)], 2, id="random"),
        pytest.param(CORNERS, 10, id="corners"),
    ],
)
def test_whatever_dice_say_within_the_masks_fits_the_schema(
    schemas: list[Any],
    num_walks: int,
    vocabulary: Vocabulary,
    tokenizer: tokenizers.Tokenizer,
    closing: list[int],
) -> None:
    dice = random.Random(0)
    formats = jsonschema.FormatChecker(["ipv4", "email", "date"])
    num_open = 0
    for schema in schemas:
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        for _ in range(num_walks):
            matcher = new_matcher(vocabulary, JsonSchema("schema", schema).to_grammar())
            token_ids = walk(matcher, closing, dice, detours=0.5, most=MAX_TOKENS)
            if token_ids is None:
                num_open += 1
                continue
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            validator.validate(json.loads(text))
    assert num_open <= len(schemas) * num_walks // 10
