"""Keywords that the grammar library does not know allow exactly the same values when rewritten."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from default_model.folder import ensure
from gateway.errors.request_errors import RequestError
from gateway.structure import rewriting
from gateway.structure.structure import JsonSchema
from wire.grammar import BadGrammar, Vocabulary, new_matcher, read_vocabulary

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 5, 6, -3, 2.5, "", "a", "b", "x", "abc", "]-^"),
    *([], [1], [1, 2], [1, 1], [2, 1], ["a", "b"], ["a", "a"], [True, False], [5, "a", 5]),
    *({}, {"a": 1}, {"a": 5}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x", "c": 3}),
    *({"k": "x", "v": "s"}, {"k": "x", "v": 1}, {"k": "y", "v": 1}, {"k": "y"}, {"ab": 1}),
]
KIND_X: Any = {"properties": {"k": {"const": "x"}}}
CHOICE: Any = {
    "properties": {"k": {"enum": ["x", "y"]}, "v": {"type": ["string", "integer"]}},
    "required": ["k"],
}
SCHEMAS: list[Any] = [
    {"not": {"const": 5}},
    {"not": {"enum": ["a", "", "]-^", None, True, 1, 6, []]}},
    {"type": "integer", "not": {"enum": [1, 5]}},
    {"enum": [1, 5, 6, "a"], "not": {"enum": [5, "a"]}},
    {"not": {"type": ["string", "number"]}},
    {"not": {"required": ["a"]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"not": {"minimum": 5}},
    {"not": {"minLength": 1}},
    {"not": {"not": {"const": 1}}},
    {"not": {"anyOf": [{"type": "string"}, {"const": 5}]}},
    {"not": {"allOf": [{"type": "string"}, {"const": "a"}]}},
    {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    {"not": False},
    {"anyOf": [{"not": {}}, {"type": "null"}]},
    CHOICE | {"if": KIND_X, "then": {"required": ["v"]}, "else": {"properties": {"v": False}}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"then": {"const": 1}},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    {"items": {"enum": ["a", "b", 1, 1.0, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "$defs": {"c": {"enum": ["a", "b"]}}},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    {"items": {"type": "string", "enum": ["a", 1]}, "uniqueItems": True},
    {"properties": {"a": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "propertyNames": {"type": "string", "title": "t"}},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"type": "string", "format": "fax", "strict": True, "x-y": 1, "propertyOrdering": ["a"]},
    {"type": "integer", "format": "int32", "example": 1},
]
# Older drafts' forms, and today's of the same meaning.
OLDER: list[tuple[Any, Any]] = [
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
    (
        {"items": [{"const": 1}], "additionalItems": False},
        {"prefixItems": [{"const": 1}], "items": False},
    ),
    ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
    ({"maximum": 5, "exclusiveMaximum": False}, {"maximum": 5}),
    (
        {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
        {"dependentRequired": {"a": ["b"], "b": ["a"]}},
    ),
]


@cache
def spoken() -> tuple[tokenizers.Tokenizer, Vocabulary]:
    tokenizer = tokenizers.Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    return tokenizer, read_vocabulary(tokenizer.to_str(), 49152, [2])


def allowed(schema: Any) -> list[Any]:
    """The values that the grammar of a schema allows."""
    tokenizer, vocabulary = spoken()
    matcher = new_matcher(vocabulary, JsonSchema("schema", schema).to_grammar())

    def accepts(value: Any) -> bool:
        ids, copy = tokenizer.encode(json.dumps(value)).ids, matcher.deep_copy()
        fits = copy.validate_tokens(ids) == len(ids) and copy.consume_tokens(ids)
        return bool(fits and copy.is_accepting())

    return [value for value in VALUES if accepts(value)]


def valid(schema: Any) -> list[Any]:
    validator = jsonschema.Draft202012Validator(schema)
    return [value for value in VALUES if validator.is_valid(value)]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:70])
def test_a_keyword_that_is_rewritten_allows_the_same_values(schema: Any) -> None:
    assert allowed(schema) == valid(schema)
    assert valid(schema)


@pytest.mark.parametrize(("older", "newer"), OLDER, ids=lambda schema: json.dumps(schema)[:50])
def test_forms_of_older_drafts_mean_the_same(older: Any, newer: Any) -> None:
    assert allowed(older) == valid(newer)


LEAVES = st.sampled_from(
    [
        *({"const": 1}, {"enum": ["a", 5]}, {"type": "string"}, {"type": ["number", "null"]}),
        *({"required": ["a"]}, {"minimum": 3}, {"maxLength": 1}, {"minItems": 2}, True, {}),
        *({"properties": {"a": {"const": 1}}}, {"dependentRequired": {"a": ["b"]}}),
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        part.map(lambda one: {"not": one}),
        st.tuples(part, part).map(lambda two: {"allOf": [*two]}),
        st.tuples(part, part).map(lambda two: {"anyOf": [*two]}),
        st.tuples(part, part, part).map(lambda p: {"if": p[0], "then": p[1], "else": p[2]}),
        part.map(lambda one: {"properties": {"a": one}}),
    ),
    max_leaves=5,
)


@given(TREES)
@settings(deadline=None, max_examples=60)
def test_any_combination_allows_the_same_values_or_is_refused(schema: Any) -> None:
    try:
        found = allowed(schema)
    except (RequestError, BadGrammar):
        return
    assert found == valid(schema), json.dumps(schema)


def test_conditions_within_conditions_are_refused_before_they_grow() -> None:
    schema: Any = {"const": 1}
    for _ in range(30):
        schema = {"if": schema, "then": {"minimum": 1}}
    with pytest.raises(RequestError, match=f"{rewriting.MAX_PIECES}|too deeply"):
        JsonSchema("schema", schema).to_grammar()
    rewriting.rewrite(schema, "schema", is_loose=True)


def test_a_loose_schema_is_held_as_far_as_it_can_be() -> None:
    place = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minContains": 1}
    schema = {"type": "object", "properties": {"a": place}, "oneOf": [{}, {"title": "x"}]}
    with pytest.raises(RequestError):
        JsonSchema("schema", schema).to_grammar()
    tokenizer, vocabulary = spoken()
    grammar = JsonSchema("schema", schema, is_loose=True).to_grammar()
    JsonSchema("schema", schema | {"format": [{}]}, is_loose=True).to_grammar()
    for value, fits in (('{"a": ["x", "x"]}', True), ('{"a": [1]}', False)):
        matcher = new_matcher(vocabulary, grammar)
        ids = tokenizer.encode(value).ids
        assert (matcher.validate_tokens(ids) == len(ids)) == fits, value
