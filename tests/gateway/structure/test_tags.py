"""Structural tags: text stays free, and what an opening begins has its form; HTTP and gRPC."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")
Accepts = Callable[[str, str], bool]

ROUTE = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "null"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
CALL, NULL = '<function=f>{"a": 1}</function>', "<function=g>null</function>"


def tagged(content: Any, begin: str = "<a>", end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**settings: Any) -> dict[str, Any]:
    tags = [tagged({"type": "any_text"})]
    return {"type": "triggered_tags", "triggers": ["<a"], "tags": tags} | settings


DIGITS = {"type": "regex", "pattern": "[0-9]+"}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY: dict[str, Any] = {"type": "any_text"}
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        TAGS,
        ["", "Hello <function", f"Well. {CALL} and\n{NULL}.", "a <think> b"],
        ["<function=g>{}</function>", "<function=h>", "<function=f>{}</function>"],
    ),
    (
        {"format": {"type": "sequence", "elements": [tagged(ANY, "<think>", "</think>"), JSON]}},
        ['<think>a </thin</think>{"a": 1}'],
        ['{"a": 1}', "<think>a", "<think>a</think>b"],
    ),
    ({"format": triggered()}, ["", "x <a>y</a> z <a></a>"], ["<a>y", "<ab"]),
    (
        {"format": triggered(at_least_one=True, stop_after_first=True)},
        ["x <a>y</a>"],
        ["", "x", "<a>y</a> z"],
    ),
    (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [tagged(DIGITS, "[", "]")],
                "separator": ", ",
            }
        },
        ["", "[1]", "[1], [23]"],
        ["[1][2]", "[a]", "[1], "],
    ),
    (
        {
            "format": {
                "type": "or",
                "elements": [
                    {"type": "const_string", "value": "no"},
                    {"type": "grammar", "grammar": 'start: "y"+'},
                ],
            }
        },
        ["no", "yyy"],
        ["n", "noy"],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS, ids=lambda value: str(value)[:40])
async def test_text_is_free_until_a_tag_begins(
    form: dict[str, Any], good: list[str], bad: list[str], running: Any, accepts: Accepts
) -> None:
    text = json.dumps({"type": "structural_tag"} | form)
    for body in (
        {"response_format": {"type": "structural_tag"} | form},
        {"structured_outputs": {"structural_tag": text}},
    ):
        await post(running, ROUTE, {"prompt": "Hello"} | body)
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(structured_output=pb.StructuredOutput(structural_tag=text))
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    first, *others = [submit.sampling.grammar for submit in running.scheduler.submits]
    assert others == [first, first]
    for text in good:
        assert accepts(first, text), text
    for text in bad:
        assert not accepts(first, text), text


async def test_a_chat_thinks_before_its_tags(running: Any) -> None:
    turn = {"role": "user", "content": "Hi"}
    body = {"messages": [turn], "response_format": {"type": "structural_tag"} | TAGS}
    await post(running, "/v1/chat/completions", body)


nested: Any = {"type": "const_string", "value": "a"}
for _ in range(20):
    nested = {"type": "or", "elements": [nested]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "format"),
    (TAGS | {"format": ANY}, "structures"),
    (TAGS | {"triggers": []}, "triggers"),
    (TAGS | {"triggers": ["<x"]}, "tags[0].begin"),
    (TAGS | {"triggers": ["<function=", "<function=h"]}, "triggers[1]"),
    (TAGS | {"triggers": ["a<think>"]}, "triggers[0]"),
    (TAGS | {"triggers": [""]}, "triggers"),
    (TAGS | {"structures": [3]}, "structures[0]"),
    ({"format": {"type": "token"}}, "format.type"),
    ({"format": {"type": "sequence", "elements": [ANY, JSON]}}, "format.elements[0]"),
    ({"format": tagged(triggered())}, "format.content"),
    ({"format": tagged({"type": "regex", "pattern": "("})}, "format.content.pattern"),
    (
        {"format": {"type": "json_schema", "json_schema": {"contains": {}}}},
        "format.json_schema.contains",
    ),
    ({"format": nested}, "format" + ".elements[0]" * 17),
    ({"format": {"type": "or", "elements": [ANY] * 400}}, "format.elements[255]"),
    ({"format": {"type": "const_string", "value": "a" * 5000}}, "format.value"),
]


@pytest.mark.parametrize(("form", "place"), REFUSED, ids=lambda value: str(value)[:50])
async def test_what_is_no_tag_is_refused_by_its_place(
    form: dict[str, Any], place: str, running: Any
) -> None:
    body = {"prompt": "Hello", "response_format": {"type": "structural_tag"} | form}
    status, field, _ = await refusal(running, ROUTE, body)
    assert (status, field) == (400, f"response_format.{place}")
    assert not running.scheduler.submits
