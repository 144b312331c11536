"""Texts are tokenized aside: callers take turns, what waits is bounded, what is left leaves."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gateway.callers.auth import CLIENT
from gateway.callers.text_turns import MIB, SHORT_BYTES, TextLimits, TextTurns
from gateway.edge.edge_limits import EdgeLimits
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import embedding_pb2, embedding_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.gateway.http_calls import error_of
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SHORT_BYTES + 1
# The tokenizer of these tests has a token of few bytes for each digit.
DIGITS = "1" * (2 * MIB)
TEXT = {"content": DIGITS, "role": "user"}


class Gate:
    """Work that a thread does not end before the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Event()

    def work(self) -> None:
        self.begun.set()
        assert self.opened.wait(patience(30))


async def as_client(name: str, turns: TextTurns, num_bytes: int, work: Callable[[], Any]) -> Any:
    CLIENT.set(name)
    return await turns.run("prompt", num_bytes, work)


@pytest_asyncio.fixture(loop_scope="module")
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


async def blocked(turns: TextTurns, gate: Gate, client: str = "blocker") -> asyncio.Task[None]:
    """The work that keeps the only thread for long texts."""
    task = asyncio.create_task(as_client(client, turns, LONG, gate.work))
    await asyncio.to_thread(gate.begun.wait)
    return task


async def test_one_callers_long_texts_take_turns_with_anothers(gate: Gate) -> None:
    turns, order = TextTurns(TextLimits()), []
    first = await blocked(turns, gate)
    names = ["many"] * 5 + ["one"]
    tasks = [
        asyncio.create_task(as_client(name, turns, LONG, lambda name=name: order.append(name)))
        for name in names
    ]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, *tasks)
    assert order == ["many", "one", *["many"] * 4]


async def test_a_short_text_does_not_wait_for_a_long_one(gate: Gate) -> None:
    turns = TextTurns(TextLimits())
    await blocked(turns, gate)
    async with asyncio.timeout(patience(10)):
        assert await as_client("blocker", turns, SHORT_BYTES, lambda: "short") == "short"


async def test_work_whose_caller_has_left_is_never_done_and_frees_its_place(gate: Gate) -> None:
    turns, done = TextTurns(TextLimits()), []
    first = await blocked(turns, gate)
    left = [
        asyncio.create_task(as_client("b", turns, LONG, lambda: done.append("left")))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    assert turns.num_bytes == 9 * LONG
    for task in (first, *left):
        task.cancel()
    await asyncio.gather(first, *left, return_exceptions=True)
    assert turns.num_bytes == LONG, "what a thread has begun counts until it ends"
    gate.opened.set()
    assert await as_client("c", turns, LONG, lambda: "next") == "next"
    assert (turns.num_bytes, done) == (0, [])


async def test_a_turn_that_came_to_a_caller_who_has_just_left_goes_to_the_next(gate: Gate) -> None:
    turns = TextTurns(TextLimits())
    first = await blocked(turns, gate)
    leaving = asyncio.create_task(as_client("b", turns, LONG, lambda: "left"))
    next_one = asyncio.create_task(as_client("c", turns, LONG, lambda: "next"))
    await asyncio.sleep(0)
    lane = turns._long
    lane._pass_on()  # as at the end of other work, before the caller leaves
    leaving.cancel()
    gate.opened.set()
    assert await next_one == "next"
    await first


@pytest.mark.parametrize(
    ("limits", "client", "option"),
    [
        (TextLimits(max_per_client=2 * LONG), "blocker", "--max-tokenizing-mib-per-client"),
        (TextLimits(max_total=2 * LONG), "other", "--max-tokenizing-mib"),
    ],
)
async def test_what_waits_is_bounded_for_each_caller_and_in_all(
    limits: TextLimits, client: str, option: str, gate: Gate
) -> None:
    turns = TextTurns(limits)
    waiting = [await blocked(turns, gate)]
    waiting.append(asyncio.create_task(as_client(client, turns, LONG, lambda: None)))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match=f"{option} is") as refusal:
        await as_client(client, turns, LONG, lambda: None)
    assert (refusal.value.kind, refusal.value.field) == (ErrorKind.OVERLOADED, "prompt")
    gate.opened.set()
    await asyncio.gather(*waiting)
    assert await as_client(client, turns, 4 * LONG, lambda: "alone") == "alone"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def test_memory_that_a_long_text_took_is_returned(tokenizer: Tokenizer) -> None:
    text = "1 2 3 a_b " * (MIB // 10)
    before = resident_mib()
    assert len(await tokenizer.encode("prompt", text, add_special_tokens=False)) > MIB // 4
    assert resident_mib() - before < 48, "it took some two hundred"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": DIGITS}, "prompt"),
        ("/tokenize", {"messages": [TEXT]}, "messages"),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [TEXT]}, "messages"),
    ],
)
async def test_a_text_that_would_take_too_much_memory_is_refused_by_its_option(
    path: str, body: dict[str, Any], param: str, running: Any
) -> None:
    response = await running.http.post(path, json=body)
    assert response.status_code == 413, response.text
    error = response.json()["error"]
    assert "--max-tokenize-mib" in error["message"]
    assert error.get("param", param) == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": DIGITS}),
        ("/v1/chat/completions", {"messages": [TEXT]}),
        ("/v1/embeddings", {"input": DIGITS, "truncate_prompt_tokens": 8}),
        ("/v1/responses", {"input": DIGITS}),
        ("/v1/messages", {"model": "tiny", "messages": [TEXT], "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["short", DIGITS], "truncate_prompt_tokens": 4}),
    ],
)
async def test_a_prompt_that_would_take_too_much_memory_is_too_long(
    path: str, body: dict[str, Any], running: Any
) -> None:
    response = await running.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "maximum context length is 256 tokens" in response.json()["error"]["message"]
    assert not running.scheduler.submits or "prompt" in body


async def test_grpc_refuses_the_same_texts(running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Tokenize(inference_pb2.TokenizeRequest(text=DIGITS))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-tokenize-mib" in str(refusal.value.details())
    embeddings = embedding_pb2_grpc.EmbeddingServiceStub(running.channel)
    request = embedding_pb2.EmbedRequest(inputs=[inference_pb2.Prompt(text=DIGITS)])
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await embeddings.Embed(request)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_leaves_takes_its_text_along(
    start: Callable[..., Any], gate: Gate, eventually: Callable[..., Any]
) -> None:
    running = await start(edge=EdgeLimits(max_tokenize_mib=3))
    turns = running.gateway._pipeline._tokenizer._turns
    await blocked(turns, gate)
    calls = [
        asyncio.create_task(running.http.post("/tokenize", json={"prompt": DIGITS}))
        for _ in range(2)
    ]
    calls.append(
        asyncio.create_task(
            running.http.post(
                "/v1/messages/count_tokens", json={"model": "tiny", "messages": [TEXT]}
            )
        )
    )
    await eventually(lambda: turns.num_bytes >= LONG + 6 * MIB, "three texts wait")
    for call in calls:
        call.cancel()
    await eventually(lambda: turns.num_bytes == LONG, "they have left")


async def test_an_operator_can_allow_longer_texts(start: Callable[..., Any]) -> None:
    running = await start(edge=EdgeLimits(max_tokenize_mib=2))
    response = await running.http.post("/tokenize", json={"prompt": "1" * (MIB + LONG)})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"])
    response = await running.http.post("/detokenize", json={"tokens": answer["tokens"][:100]})
    assert set(response.json()["prompt"]) == {"1"}
    error = error_of(await running.http.post("/tokenize", json={"prompt": 2 * DIGITS}), 413)
    assert error["param"] == "prompt"
