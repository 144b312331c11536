"""Numbers of schemas are held to the last digit, or refused by their place."""

import json
import random
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
import tokenizers
from jsonschema import validators

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.structure.exact.numbers import Rounded, read_number
from gateway.structure.structure import JsonSchema
from tests.exact_schemas import Maker
from tests.gateway.structure.walks import walk
from tests.worker_svc.spelling import EOS, VOCAB_SIZE, make_tokenizer
from wire.grammar import BadGrammar, Matcher, Vocabulary, new_matcher, read_vocabulary

NUM_SCHEMAS = 500
MAX_TOKENS = 400
BIG = 1234567890123456789
REFUSED = (ErrorKind.INVALID, ErrorKind.UNSUPPORTED)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return read_vocabulary(tokenizer.to_str(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def closing(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Tokens that bring an output closer to its end."""
    return [EOS, *(tokenizer.token_to_id(character) for character in '"}],01')]


def exactly(text: str) -> Any:
    """A JSON text with fractions in place of floats."""
    return json.loads(text, parse_float=lambda number: Fraction(Decimal(number)))


def is_integer(_: object, value: Any) -> bool:
    is_whole = isinstance(value, Fraction) and value.denominator == 1
    return is_whole or (isinstance(value, int) and not isinstance(value, bool))


def is_multiple(_: object, step: Any, value: Any, __: object) -> Any:
    is_number = isinstance(value, (int, Fraction)) and not isinstance(value, bool)
    if is_number and (Fraction(value) / Fraction(step)).denominator != 1:
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


Validator = validators.extend(
    jsonschema.Draft202012Validator,
    {"multipleOf": is_multiple},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
)


def spelled(value: Any) -> str:
    """A value as compact JSON, decimals digit by digit."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        members = (f"{spelled(name)}:{spelled(part)}" for name, part in value.items())
        return f"{{{','.join(members)}}}"
    return json.dumps(value, ensure_ascii=False)


def accepts(matcher: Matcher, tokenizer: tokenizers.Tokenizer, text: str) -> bool:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def matcher_of(vocabulary: Vocabulary, schema: Any) -> Matcher | None:
    """The matcher of a schema's grammar; None: it was refused by a place."""
    try:
        return new_matcher(vocabulary, JsonSchema("schema", schema).to_grammar())
    except RequestError as error:
        assert error.kind in REFUSED and str(error).startswith("schema"), str(error)
    except BadGrammar as error:  # the gateway finds its place
        assert "oneOf" in str(error), str(error)
    return None


def test_numbers_that_doubles_round_are_exact_or_refused_by_their_place(
    vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer, closing: list[int]
) -> None:
    maker, dice, num_refused, num_open = Maker(1), random.Random(2), 0, 0
    for _ in range(NUM_SCHEMAS):
        schema, value = maker.root()
        text = json.dumps(schema)
        matcher = matcher_of(vocabulary, json.loads(text, parse_float=read_number))
        if matcher is None:
            num_refused += 1
            continue
        validator = Validator(exactly(text))
        validator.validate(exactly(spelled(value)))
        assert accepts(matcher.deep_copy(), tokenizer, spelled(value)), (schema, value)
        token_ids = walk(matcher, closing, dice, detours=0.4, most=MAX_TOKENS)
        if token_ids is None:
            num_open += 1
            continue
        validator.validate(exactly(tokenizer.decode(token_ids, skip_special_tokens=False)))
    assert num_refused <= NUM_SCHEMAS // 5 and num_open <= NUM_SCHEMAS // 10


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"title": "x", "anyOf": [{"const": BIG}, {"$ref": "#/title"}]}, "leads to no schema"),
        ({"anyOf": [{"const": BIG}, {"$ref": "#/anyOf/-1"}]}, "leads to no schema"),
        ({"allOf": [{"minLength": "a"}, {"minLength": 1}], "const": BIG}, "combines minLength"),
        ({"anyOf": [{"const": BIG + i} for i in range(3_000)]}, "more than 1024 alternatives"),
        (
            {
                "$defs": {
                    "a": {
                        "properties": {
                            "x": {
                                "allOf": [
                                    {"$ref": "#/$defs/a"},
                                    {"properties": {"x": {"$ref": "#/$defs/a"}}},
                                ]
                            }
                        },
                        "required": ["x"],
                        "minimum": BIG,
                    }
                },
                "$ref": "#/$defs/a",
            },
            "too many ways",
        ),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a", "const": BIG}, "lead back"),
    ],
)
def test_what_is_not_written_is_refused_in_bounded_work(schema: Any, problem: str) -> None:
    before = time.thread_time()
    with pytest.raises(RequestError, match=problem):
        JsonSchema("schema", schema).to_grammar()
    assert time.thread_time() - before < 30  # hundredths of a second each, but for one


def test_a_schema_that_only_describes_loses_what_cannot_be_exact() -> None:
    schema = {"properties": {"const": {"enum": [BIG]}, "minimum": {"multipleOf": BIG}}}
    plain = {"properties": {"const": {}, "minimum": {}}}
    grammars = [JsonSchema("schema", one, is_loose=True).to_grammar() for one in (schema, plain)]
    assert grammars[0] == grammars[1]


@pytest.mark.parametrize("text", ["1e-99999999999999999999", "1e-400", "0.12345678901234567890"])
def test_decimals_that_lose_digits_are_told_apart(text: str) -> None:
    assert isinstance(read_number(text), Rounded)
    assert not isinstance(read_number("0.1"), Rounded)
    assert not isinstance(read_number("1e308"), Rounded)
