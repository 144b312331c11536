"""Structured output: the grammars sent to the scheduler, and the refusals."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}
CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'
LARK = 'start: "yes" | "no" DIGIT\nDIGIT: /[0-9]/'

Accepts = Callable[[str, str], bool]


ADA, BAD_ADA = '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": -1}'
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
    ({"response_format": PERSON_FORMAT}, ADA, BAD_ADA),
    ({"guided_json": PERSON}, ADA, '{"name": "Ada"}'),
    ({"guided_json": json.dumps(PERSON)}, ADA, BAD_ADA),
    ({"guided_regex": "[ab]{2}c"}, "abc", "abbc"),
    ({"guided_regex": "[/\\w]+\\d\\s"}, "a/b1 ", "a/b\u0661 "),
    ({"guided_regex": "\\d"}, "7", "\u0667"),
    ({"guided_choice": ['a "b"\n', "c"]}, 'a "b"\n', "a"),
    ({"guided_grammar": GBNF}, "no7", "no"),
    ({"guided_grammar": LARK}, "no7", "no77"),
    ({"structured_outputs": {"json": PERSON}}, ADA, BAD_ADA),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "(?i)yes"}}, "YeS", "no"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "green", "blue"),
    ({"structured_outputs": {"grammar": LARK}}, "yes", "y"),
    (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        '{"name":"Ada","age":36}',
        ADA,
    ),
    (
        {"response_format": PERSON_FORMAT, "guided_whitespace_pattern": "\n"},
        '{"name":\n"Ada","age":36}',
        ADA,
    ),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, "aa", ""),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "good", "bad"), FORMS, ids=lambda value: str(value)[:40])
async def test_a_form_becomes_a_grammar(
    route: str, fields: dict[str, Any], good: str, bad: str, running: Any, accepts: Accepts
) -> None:
    response = await running.http.post(route, json=ROUTES[route] | fields)
    assert response.status_code == 200, response.text
    (submit,) = running.scheduler.submits
    assert accepts(submit.sampling.grammar, good)
    assert not accepts(submit.sampling.grammar, bad)


async def test_plain_text_asks_for_no_grammar(running: Any) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}):
        response = await running.http.post(CHAT, json=ROUTES[CHAT] | fields)
        assert response.status_code == 200, response.text
    assert [submit.sampling.grammar for submit in running.scheduler.submits] == [""] * 3


async def test_blanks_are_bounded_and_keys_have_one_spelling(
    running: Any, accepts: Accepts
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = ROUTES[CHAT] | {"guided_json": schema}
    assert (await running.http.post(CHAT, json=body)).status_code == 200
    grammar = running.scheduler.submits[0].sampling.grammar
    for blanks in ("", " " * 4, "\n", "\r\n\t", "\n" + " " * 32):
        assert accepts(grammar, '{"a":' + blanks + "1}")
    for blanks in (" " * 5, "\n\n", " \n", "\n" + " " * 33):
        assert not accepts(grammar, '{"a":' + blanks + "1}")
    assert accepts(grammar, '{"b": "x\\n"}')
    assert not accepts(grammar, '{"\\u0061": "x"}')


async def test_all_n_outputs_have_the_grammar(running: Any) -> None:
    body = ROUTES[CHAT] | {"guided_regex": "a+", "n": 3}
    assert (await running.http.post(CHAT, json=body)).status_code == 200
    grammars = [submit.sampling.grammar for submit in running.scheduler.submits]
    assert len(grammars) == 3 and len(set(grammars)) == 1 and grammars[0]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# (schema, part of it that is named, word of the message)
BAD_SCHEMAS: list[tuple[Any, str, str]] = [
    ({"type": "objekt"}, "", "objekt"),
    ({"properties": {"a": {"not": {"pattern": "x"}}}}, ".properties.a.not.pattern", "negated"),
    ({"type": "object", "requird": ["a"]}, ".requird", "keyword"),
    ({"items": {"anyOf": [{}, {"contains": {}}]}}, ".items.anyOf[1].contains", "keyword"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "of an enum"),
    ({"items": {"enum": [*range(9)]}, "uniqueItems": True}, ".uniqueItems", "400"),
    ({"if": {"$ref": "#/$defs/a"}, "then": {"minimum": 1}}, ".if.$ref", "negated"),
    ({"nullable": True, "properties": {"a": {"$ref": "#/properties/b"}}}, ".properties.a.$ref", ""),
    ({"x-guidance": {}}, ".x-guidance", "keyword"),
    ({"type": "string", "nullable": 1}, ".nullable", "true or false"),
    ({"type": "array", "maxItems": "1"}, ".maxItems", "number"),
    ({"dependentRequired": {"a": "b"}}, ".dependentRequired.a", "names"),
    ({"not": {"dependencies": {"a": [[]]}}}, ".not.dependencies.a", "names"),
    ({"type": "object", "minProperties": 2}, ".minProperties", "guaranteed"),
    ({"enum": ["a\x01"]}, ".enum", "control"),
    ({"properties": {"a b": {"type": 3}}}, '.properties["a b"].type', "names"),
    ({"properties": {"a": {"pattern": "(?=x)"}}}, ".properties.a", "look-around"),
    ({"properties": {"a": {"pattern": "(x"}}}, ".properties.a", "unclosed"),
    ({"$defs": {"d": {"format": "iri"}}, "items": {"$ref": "#/$defs/d"}}, ".$defs.d.format", "iri"),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}}, ".properties.a", "/$defs/x"),
    ({"properties": {"a": {"$ref": "https://x.example/s"}}}, ".properties.a", "x.example"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "", "greater"),
    (False, "", "nothing"),
    ({"properties": {"a": 3}}, ".properties.a", "object"),
    ({"properties": [3]}, ".properties", "object"),
    ({"prefixItems": {"a": 1}}, ".prefixItems", "array"),
    ({"enum": []}, "", "empty"),
    ({"enum": 3}, ".enum", "array"),
    ({"required": "a"}, ".required", "array"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "", "oneOf"),
    ([], "", "object"),
    (nested(65), ".items" * 65, "64"),
    ({"description": "x" * limits.MAX_SCHEMA_BYTES}, "", "bytes"),
]


@pytest.mark.parametrize(("schema", "part", "word"), BAD_SCHEMAS, ids=lambda value: str(value)[:60])
async def test_a_schema_that_cannot_be_guaranteed_is_refused_with_its_place(
    schema: Any, part: str, word: str, running: Any
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = ROUTES[CHAT] | {"response_format": wanted}
    response = await running.http.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    place = "response_format.json_schema.schema" + part
    shown = RequestError(ErrorKind.INVALID, "", field=place).field  # a long one is cut
    assert error["param"] == shown
    assert place in error["message"] and word in error["message"]
    assert running.scheduler.submits == []


async def test_schemas_at_their_limits_pass(running: Any) -> None:
    filler = {"description": ""}
    room = limits.MAX_SCHEMA_BYTES - len(json.dumps(filler))
    for schema in (
        nested(64),
        {"description": "x" * room},
        {"items": {"uniqueItems": False}},
        True,
    ):
        body = ROUTES[CHAT] | {"guided_json": schema}
        response = await running.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "\ud800"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_regex": r"(a)\1"}, "guided_regex"),
    ({"guided_regex": "a" * (limits.MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"guided_choice": ["a"] * (limits.MAX_CHOICE_OPTIONS + 1)}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_grammar": 'root ::= "a" ('}, "guided_grammar"),
    ({"guided_grammar": 'start[temperature=0.5]: "a"'}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"structured_outputs": {"grammar": "root ::= nope"}}, "structured_outputs.grammar"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_other_forms_are_refused_by_name(
    fields: dict[str, Any], param: str, running: Any
) -> None:
    body = json.dumps(ROUTES[CHAT] | fields)
    headers = {"content-type": "application/json"}
    response = await running.http.post(CHAT, content=body, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert running.scheduler.submits == []


PROMPT = pb.Prompt(text="Hello")
PROTO_FORMS: list[tuple[pb.StructuredOutput, str, str]] = [
    (pb.StructuredOutput(json_schema=json.dumps(PERSON)), ADA, BAD_ADA),
    (pb.StructuredOutput(json_object=pb.JsonObject()), '{"a": 1}', "[]"),
    (pb.StructuredOutput(regex="[0-9]+"), "12", "1a"),
    (pb.StructuredOutput(choice=pb.Choice(options=["yes", "no"])), "no", "nope"),
    (pb.StructuredOutput(grammar=LARK), "no1", "no"),
    (
        pb.StructuredOutput(json_schema=json.dumps(PERSON), whitespace_pattern=""),
        '{"name":"Ada","age":36}',
        ADA,
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), PROTO_FORMS, ids=str)
async def test_the_same_forms_come_over_grpc(
    form: pb.StructuredOutput, good: str, bad: str, running: Any, accepts: Accepts
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(structured_output=form)
    await stub.Generate(pb.GenerateRequest(prompt=PROMPT, options=options))
    grammar = running.scheduler.submits[0].sampling.grammar
    assert accepts(grammar, good) and not accepts(grammar, bad)


PROTO_REFUSED: list[tuple[pb.GenerationOptions, str]] = [
    (pb.GenerationOptions(structured_output=pb.StructuredOutput()), "structured_output"),
    (
        pb.GenerationOptions(structured_output=pb.StructuredOutput(json_schema='{"contains": {}}')),
        "structured_output.json_schema.contains",
    ),
    (
        pb.GenerationOptions(structured_output=pb.StructuredOutput(json_schema="{")),
        "structured_output.json_schema",
    ),
    (
        pb.GenerationOptions(structured_output=pb.StructuredOutput(choice=pb.Choice())),
        "structured_output.choice.options",
    ),
    (
        pb.GenerationOptions(
            structured_output=pb.StructuredOutput(regex="a", whitespace_pattern=" ")
        ),
        "structured_output.whitespace_pattern",
    ),
    (
        pb.GenerationOptions(sampling=types_pb2.SamplingParams(grammar='start: "a"')),
        "sampling.grammar",
    ),
]


@pytest.mark.parametrize(("options", "field"), PROTO_REFUSED, ids=lambda value: str(value)[:60])
async def test_grpc_refuses_with_the_same_places(
    options: pb.GenerationOptions, field: str, running: Any
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(prompt=PROMPT, options=options))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    details = BadRequest()
    status.details[0].Unpack(details)
    assert [violation.field for violation in details.field_violations] == [field]
