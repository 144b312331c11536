"""No grammar ends a service or another request: over HTTP, and straight to the scheduler."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from gateway.structure.structure import JsonSchema
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests import hostile_grammars as hostile
from tests.e2e.conftest import Product
from tests.pace import patience

Scheduler = scheduler_pb2_grpc.SchedulerServiceStub
SCHEMA = "response_format.json_schema.schema"
HUGE = f'{{"type": "integer", "maximum": 1{"0" * 400}}}'


@pytest.fixture
def scheduler(tiny_product: Product) -> Iterator[Scheduler]:
    with grpc.insecure_channel(f"127.0.0.1:{tiny_product.scheduler_port}") as channel:
        yield Scheduler(channel)


@pytest.fixture(autouse=True)
def survivors(tiny_product: Product) -> Iterator[None]:
    """Every service is the process that it was before the test."""
    before = {name: process.pid for name, process in tiny_product.processes.items()}
    yield
    for name, process in tiny_product.processes.items():
        assert process.poll() is None, tiny_product.log_of(name)
    assert before == {name: process.pid for name, process in tiny_product.processes.items()}


def post(product: Product, body: str) -> tuple[int, dict[str, Any]]:
    """Status and body of a chat completion; the request is text, for numbers beyond JSON."""
    url, headers = f"{product.url}/v1/chat/completions", {"content-type": "application/json"}
    answer = httpx.post(url, content=body, headers=headers, timeout=patience(120))
    return answer.status_code, answer.json()


def chat(fields: str) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps({"messages": messages, "max_tokens": 4})[:-1] + f", {fields}}}"


def schema_field(schema: str) -> str:
    inner = f'{{"name": "s", "schema": {schema}}}'
    return f'"response_format": {{"type": "json_schema", "json_schema": {inner}}}'


def generate(scheduler: Scheduler, grammar: str, max_tokens: int = 4) -> list[int]:
    """The tokens of a request straight to the scheduler."""
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=[1, 2, 3],
        sampling=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, grammar=grammar),
    )
    answers = scheduler.Generate(request, timeout=patience(120))
    return [token_id for answer in answers for token_id in answer.token_ids]


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        (json.dumps(hostile.chained_definitions(1_200)), SCHEMA, "nested too deeply"),
        (json.dumps(hostile.chained_references(3_000)), SCHEMA, "nested too deeply"),
        (
            json.dumps(hostile.many_properties(2_100)),
            f"{SCHEMA}.properties",
            "may be left out",
        ),
        ('{"type": "number", "minimum": 1e400}', f"{SCHEMA}.minimum", "not a finite number"),
        ('{"type": "number", "minimum": NaN}', f"{SCHEMA}.minimum", "not a finite number"),
        (HUGE, f"{SCHEMA}.maximum", "out of range"),
        (json.dumps({"default": hostile.nested(128)}), SCHEMA, "nested deeper than 123"),
    ],
    ids=["definitions", "references", "properties", "1e400", "NaN", "10**400", "nested default"],
)
def test_a_schema_that_no_service_can_follow_is_refused_by_its_place(
    tiny_product: Product, schema: str, place: str, reason: str
) -> None:
    status, body = post(tiny_product, chat(schema_field(schema)))
    assert status == 400, body
    assert body["error"]["param"] == place
    assert any(part in body["error"]["message"] for part in reason.split("|")), body


def test_a_grammar_nested_too_deeply_is_refused_over_http(tiny_product: Product) -> None:
    grammar = json.dumps(hostile.chained_rules(3_000))
    status, body = post(tiny_product, chat(f'"guided_grammar": {grammar}'))
    assert (status, body["error"]["param"]) == (400, "guided_grammar"), body
    assert "the grammar is nested too deeply" in body["error"]["message"]


def test_a_large_schema_that_can_be_followed_is(tiny_product: Product) -> None:
    status, body = post(tiny_product, chat(schema_field(json.dumps(hostile.many_required(1_500)))))
    assert status == 200, body
    assert body["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (hostile.chained_rules(3_000), "nested too deeply"),
        (JsonSchema("s", hostile.chained_definitions(1_200)).to_grammar(), "nested too deeply"),
        ("start: missing", "missing"),
    ],
    ids=["rules", "definitions", "unknown rule"],
)
def test_a_grammar_sent_straight_to_the_scheduler_ends_its_request_alone(
    scheduler: Scheduler, grammar: str, reason: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, scheduler, 'start: "a"{200}', 100)
        with pytest.raises(grpc.RpcError) as raised:
            generate(scheduler, grammar)
        assert len(other.result()) >= 20  # "aaaa" may be one token
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("grammar: ")
    assert reason in raised.value.details()


def test_a_million_repetitions_cost_nothing_until_they_come(scheduler: Scheduler) -> None:
    assert len(generate(scheduler, "start: /a{999999}/", 20)) >= 5  # "aaaa" may be one token
