"""Numbers at the edges, in every field of every body: an answer, or a refusal by name; never a 500.

The fields come from the schemas, so one that is added is drawn as well. The bodies that score are
in tests/gateway/scoring, with a scheduler that judges.
"""

import asyncio
import json
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from pydantic import BaseModel

from gateway.http.anthropic.body import CountBody, MessagesBody
from gateway.http.embeddings import EmbeddingBody
from gateway.http.response_body import ResponseBody
from gateway.http.routes.tokens import DetokenizeBody, TokenizeBody
from gateway.http.schema import ChatCompletionBody, CompletionBody
from tests.edges import INTEGERS
from tests.gateway.conftest import Running
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
HUGE = 10**400
NUMBERS = [str(value) for value in (*INTEGERS, HUGE, -HUGE, 2**64, 2**128)]
NUMBERS += [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "9" * 5000,
    "5e-324",
    "-0.0",
    "3.5e38",
    "1e300",
]
NUMBERS += [
    "1.5",
    "2147483647.5",
    "1e9",
    "1e10",
    "4294967296.0",
    "true",
    '"1"',
    "[]",
    "{}",
    "[null]",
]

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionBody, CHAT),
    "/v1/completions": (CompletionBody, {"prompt": "Hello"}),
    "/v1/embeddings": (EmbeddingBody, {"input": "Hello"}),
    "/v1/responses": (ResponseBody, {"input": "Hello"}),
    "/v1/messages": (MessagesBody, CHAT),
    "/v1/messages/count_tokens": (CountBody, CHAT),
    "/tokenize": (TokenizeBody, {"prompt": "Hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [3]}),
}
# Lists of numbers without a type in the schema, and single numbers in objects.
SHAPES = ("{}", "[{}]", "[1, {}]", '{{"1": {}}}')


def _holds_numbers(kind: Any) -> bool:
    """True if a type may hold a number, or anything at all."""
    if kind in (int, float, Any):
        return True
    if get_origin(kind) in (Union, types.UnionType, list, tuple, dict):
        return any(map(_holds_numbers, get_args(kind)))
    return False


def _fields() -> Iterator[tuple[str, str]]:
    for route, (body, _) in BODIES.items():
        for name, field in body.model_fields.items():
            if _holds_numbers(field.annotation):
                yield route, name


FIELDS = list(_fields())


@st.composite
def _bodies(draw: DrawFn) -> tuple[str, dict[str, str]]:
    """A route, and numbers at an edge, as JSON, for up to three of its fields."""
    route, first = draw(st.sampled_from(FIELDS))
    more = [name for other, name in FIELDS if other == route]
    names = {first, *draw(st.lists(st.sampled_from(more), max_size=2))}
    numbers, shapes = st.sampled_from(NUMBERS), st.sampled_from(SHAPES)
    return route, {name: draw(shapes).format(draw(numbers)) for name in sorted(names)}


def _text(route: str, edges: dict[str, str]) -> str:
    plain = {name: json.dumps(value) for name, value in BODIES[route][1].items()}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in (plain | edges).items()) + "}"


async def _post(running: Running, route: str, text: str) -> tuple[int, dict[str, Any]]:
    response = await running.http.post(route, content=text, headers=JSON)
    return response.status_code, response.json()


async def test_every_field_answers_every_number(running: Running) -> None:
    running.scheduler.output = []  # it knows no log probabilities
    for route, name in FIELDS:
        for number in NUMBERS:
            text = _text(route, {name: number})
            status, body = await _post(running, route, text)
            assert status in (200, 400), f"{route} {name} = {number[:30]}: {status} {body}"
            if status == 400:
                told = f"{body['error']['param']} {body['error']['message']}"
                is_read = len(number) < 4300  # beyond, Python reads no integer
                assert name in told or not is_read, f"{route} {name} = {number[:30]}: {told}"


async def test_several_numbers_at_once_are_answered(running: Running) -> None:
    running.scheduler.output = []
    await asyncio.to_thread(_draw_bodies, running.http_url)


def _draw_bodies(url: str) -> None:
    """In a thread of its own: hypothesis knows no event loop."""
    with httpx.Client(base_url=url, timeout=patience(10)) as client:

        @settings(max_examples=150, deadline=None, derandomize=True)
        @given(_bodies())
        def is_answered(drawn: tuple[str, dict[str, str]]) -> None:
            route, edges = drawn
            response = client.post(route, content=_text(route, edges), headers=JSON)
            assert response.status_code in (200, 400), f"{route} {edges}: {response.text}"

        is_answered()


async def test_a_huge_min_tokens_is_refused_and_reaches_no_scheduler(running: Running) -> None:
    for min_tokens in (2**32 - 1, 2**31):
        status, body = await _post(
            running, "/v1/chat/completions", json.dumps(CHAT | {"min_tokens": min_tokens})
        )
        assert status == 400 and body["error"]["param"] == "min_tokens"
    assert not running.scheduler.submits


async def test_a_timeout_header_is_a_time(running: Running) -> None:
    for text in ("nan", "inf", "-inf", "1e300", "0", "-1", "1e10", "x"):
        headers = {"x-timeout-s": text}
        response = await running.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-timeout-s"
