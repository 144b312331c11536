"""Schemas with numbers beyond 2**53, by each way in which a client can send one."""

import json
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.gateway.http_calls import accepts, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

ID, ROUNDED = 1234567890123456789, 1234567890123456768
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"enum": [ID]}, "n": {"$ref": "#/$defs/n"}},
    "required": ["id"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1}},
}
GOOD, WRONG = [f'{{"id": {ID}}}'], [f'{{"id": {ROUNDED}}}', '{"id": 1234567890123456800}']
GOOD += [f'{{"id": {ID}, "n": {number}}}' for number in (2**53 + 1, 2**63 - 1)]
WRONG += [f'{{"id": {ID}, "n": {number}}}' for number in (2**53, 2**63, 2**63 + 1)]
LOST = '{"type": "number", "minimum": 0.12345678901234567890}'
TOOL = {"name": "f", "parameters": SCHEMA}
ASKED: Any = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FORM = {"name": "f", "schema": SCHEMA}
FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ASKED | {"response_format": {"type": "json_schema", "json_schema": FORM}}),
    (
        CHAT,
        ASKED
        | {"response_format": {"type": "json_schema", "json_schema": FORM | {"strict": True}}},
    ),
    (CHAT, ASKED | {"guided_json": SCHEMA}),
    (CHAT, ASKED | {"guided_json": json.dumps(SCHEMA)}),
    (CHAT, ASKED | {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "Hi", "guided_json": SCHEMA}),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema"} | FORM}}),
    (
        MESSAGES,
        ASKED
        | {
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]
STRICT = {"type": "function", "function": TOOL | {"strict": True}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
ANTHROPIC = {"name": "f", "input_schema": SCHEMA}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ASKED | {"tools": [STRICT]}),
    (CHAT, ASKED | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
    (RESPONSES, {"input": "Hi", "tools": [FLAT | {"strict": True}]}),
    (RESPONSES, {"input": "Hi", "tools": [FLAT | {"strict": False}], "tool_choice": "required"}),
    (MESSAGES, ASKED | {"max_tokens": 9, "tools": [ANTHROPIC], "tool_choice": {"type": "any"}}),
    (MESSAGES, ASKED | {"max_tokens": 9, "tools": [ANTHROPIC | {"strict": True}]}),
]


@pytest.mark.parametrize(("route", "body"), FORMS)
async def test_a_form_holds_numbers_that_a_double_rounds(
    route: str, body: dict[str, Any], running: Any, tokenizer: Any
) -> None:
    await running.http.post(route, json=body)
    assert all(accepts(running, tokenizer, text) for text in GOOD)
    assert not any(accepts(running, tokenizer, text) for text in WRONG)


@pytest.mark.parametrize(("route", "body"), CALLS)
async def test_a_tool_holds_numbers_that_a_double_rounds(
    route: str, body: dict[str, Any], running: Any, tokenizer: Any
) -> None:
    await running.http.post(route, json=body)
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    if "tool_choice" in body:
        call = '[{{"name": "f", "parameters": {}}}]'
    assert all(accepts(running, tokenizer, call.format(text)) for text in GOOD)
    assert not any(accepts(running, tokenizer, call.format(text)) for text in WRONG)


async def test_grpc_holds_numbers_that_a_double_rounds(running: Any, tokenizer: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    form = pb.StructuredOutput(json_schema=json.dumps(SCHEMA))
    options = pb.GenerationOptions(structured_output=form)
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hi"), options=options))
    assert all(accepts(running, tokenizer, text) for text in GOOD)
    assert not any(accepts(running, tokenizer, text) for text in WRONG)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"anyOf": [{}, {"type": "integer", "multipleOf": 2**53 + 1}]}, ".anyOf[1].multipleOf"),
        ({"type": "integer", "maximum": 10**120}, ".maximum"),
        ({"items": {"type": "number", "multipleOf": 0.07}}, ".items.multipleOf"),
        ({"properties": {"a": {"multipleOf": 0}}}, ".properties.a.multipleOf"),
        ({"minimum": "5"}, ".minimum"),
    ],
)
async def test_what_cannot_be_exact_is_refused_by_its_place(
    schema: dict[str, Any], place: str, running: Any
) -> None:
    status, param, _ = await refusal(running, CHAT, ASKED | {"guided_json": schema})
    assert (status, param) == (400, f"guided_json{place}")


async def test_digits_that_a_double_loses_are_refused_by_their_place(running: Any) -> None:
    text = json.dumps(ASKED | {"guided_json": "SCHEMA", "temperature": "NUMBER"})
    text = text.replace('"NUMBER"', "0.70000000000000001")  # elsewhere digits may be lost
    text = text.replace('"SCHEMA"', LOST)
    headers = {"content-type": "application/json"}
    response = await running.http.post(CHAT, content=text, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_json.minimum"
    response = await running.http.post(CHAT, json=ASKED | {"guided_json": LOST})
    assert response.json()["error"]["param"] == "guided_json.minimum"
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(structured_output=pb.StructuredOutput(json_schema=LOST))
    with pytest.raises(grpc.aio.AioRpcError, match=r"json_schema\.minimum"):
        await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hi"), options=options))
