"""Parts of an answer that a request asks for: ids, counts, padding, the prompt."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.chat.reasoning import ReasoningTokens
from simulator.workers.prompt_outputs import logprob_of
from tests.gateway.http_calls import post, telling_logprobs
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 9},
    CHATS: {"messages": [USER]},
}


async def stream(running: Any, route: str, **fields: Any) -> list[dict[str, Any]]:
    response = await running.http.post(route, json=BODIES[route] | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


@pytest.mark.parametrize("route", BODIES)
async def test_token_ids_are_the_same_streamed_and_whole(route: str, running: Any) -> None:
    whole = await post(running, route, BODIES[route] | {"return_token_ids": True})
    chunks = await stream(running, route, return_token_ids=True)
    (choice,) = whole["choices"]
    place = whole if route == CHATS else choice
    assert place["prompt_token_ids"] == running.scheduler.prompt_of(0)
    assert choice["token_ids"] == running.scheduler.output
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    streamed = [token_id for one in choices for token_id in one.get("token_ids", ())]
    assert streamed == choice["token_ids"]
    places = chunks if route == CHATS else choices
    told = [found for one in places if (found := one.get("prompt_token_ids")) is not None]
    assert told == [place["prompt_token_ids"]]
    assert text_of(chunks) == "Hello world"


@pytest.mark.parametrize("route", BODIES)
async def test_every_chunk_counts_the_tokens_so_far(route: str, running: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await stream(running, route, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == last["usage"]["completion_tokens"] == len(running.scheduler.output)
    assert last["choices"] == [] and text_of(chunks) == "Hello world"
    prompts = {chunk["usage"]["prompt_tokens"] for chunk in (*chunks, last) if chunk["usage"]}
    assert prompts == {len(running.scheduler.prompt_of(0))}


@pytest.mark.parametrize("route", BODIES)
async def test_padding_hides_how_long_the_text_of_a_chunk_is(route: str, running: Any) -> None:
    chunks = await stream(running, route, stream_options={"include_obfuscation": True})
    assert text_of(chunks) == "Hello world"
    sizes = {
        len(json.dumps(chunk["choices"][0], separators=(",", ":"))) + len(chunk["obfuscation"])
        for chunk in chunks
    }
    assert all(size % 32 == 0 for size in sizes)


async def test_a_last_turn_of_the_assistant_is_echoed(running: Any) -> None:
    turns = [USER, {"role": "assistant", "content": "I say: "}]
    fields = {"messages": turns, "echo": True, "continue_final_message": True}
    whole = await post(running, CHATS, fields)
    assert whole["choices"][0]["message"]["content"] == "I say: Hello world"
    assert text_of(await stream(running, CHATS, **fields)) == "I say: Hello world"
    plain = await post(running, CHATS, {"messages": [USER], "echo": True})
    assert plain["choices"][0]["message"]["content"] == "Hello world"


async def test_a_completion_is_echoed_in_a_stream_once(running: Any) -> None:
    assert text_of(await stream(running, COMPLETIONS, echo=True)) == "HelloHello world"


@pytest.mark.parametrize("route", BODIES)
async def test_prompt_log_probabilities_come_with_the_first_chunk(route: str, running: Any) -> None:
    whole = await post(running, route, BODIES[route] | {"prompt_logprobs": 1})
    chunks = await stream(running, route, prompt_logprobs=1)
    place = whole if route == CHATS else whole["choices"][0]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    places = chunks if route == CHATS else choices
    assert [one["prompt_logprobs"] for one in places if "prompt_logprobs" in one] == [
        place["prompt_logprobs"]
    ]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1}, slice(-255, None)),
        ({"truncate_prompt_tokens": 999}, slice(None)),
    ],
    ids=str,
)
async def test_a_prompt_is_truncated_to_its_last_tokens(
    fields: dict[str, Any], kept: slice, running: Any
) -> None:
    num_tokens = 300 if fields["truncate_prompt_tokens"] == -1 else 20
    prompt = [5 + index % 7 for index in range(num_tokens)]
    await post(running, COMPLETIONS, {"prompt": prompt} | fields)
    assert running.scheduler.prompt_of(0) == prompt[kept]


async def test_the_echo_of_a_truncated_prompt_is_what_is_left_of_it(running: Any) -> None:
    body = {"prompt": "Hello world, how are you today?", "echo": True, "truncate_prompt_tokens": 2}
    (choice,) = (await post(running, COMPLETIONS, body))["choices"]
    left = running.gateway._pipeline._tokenizer.decode(
        running.scheduler.prompt_of(0), skip_special_tokens=True
    )
    assert choice["text"] == left + "Hello world"


async def test_a_prompt_far_above_the_limit_is_refused_before_it_is_tokenized(running: Any) -> None:
    body = {"prompt": "x " * 1_000_000, "truncate_prompt_tokens": 5}
    response = await running.http.post(COMPLETIONS, json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_log_probabilities_can_name_tokens_by_their_ids(running: Any) -> None:
    def tell(ids: NDArray[np.int32], num_top: int) -> LogprobColumns:
        top = ids[:, None] + np.arange(num_top)
        return LogprobColumns(np.arange(len(ids)), *logprob_of(ids), top, logprob_of(top)[0])

    with telling_logprobs(running.scheduler, tell) as scheduler:
        ids = {"return_tokens_as_token_ids": True}
        body = BODIES[COMPLETIONS] | {"logprobs": True, "echo": True} | ids
        (choice,) = (await post(running, COMPLETIONS, body))["choices"]
        all_ids = [*scheduler.prompt_of(0), *scheduler.output]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in all_ids]
        assert scheduler.submits[0].sampling.logprobs == 1  # of true
        body = BODIES[CHATS] | {"logprobs": True, "top_logprobs": 1} | ids
        content = (await post(running, CHATS, body))["choices"][0]["logprobs"]["content"]
        assert [token["token"] for token in content] == [f"token_id:{i}" for i in scheduler.output]
        assert all(token["top_logprobs"][0]["token"].startswith("token_id:") for token in content)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("is_open", [False, True])
async def test_reasoning_is_counted_by_its_tokens_and_never_above_all(
    size: int, is_open: bool
) -> None:
    tokens = ["<th", "ink>", " Hm", ".", " So", "</", "think", ">", " Yes", "."]
    tokens = tokens[2:] if is_open else tokens
    meter = ReasoningTokens(is_open=is_open)
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        meter.add("".join(piece), len(piece))
    exact = len(tokens) - 2
    assert meter.count == exact if size == 1 else abs(meter.count - exact) <= size
    assert meter.count <= len(tokens)


async def test_text_that_does_not_reason_counts_nothing() -> None:
    meter = ReasoningTokens(is_open=False)
    for piece in ("<", "th", "e end"):
        meter.add(piece, 1)
    assert meter.count == 0


async def test_an_answer_without_text_has_no_parts_whole_or_streamed(running: Any) -> None:
    running.scheduler.output = []

    async def events(route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        response = await running.http.post(route, json=body | {"stream": True})
        return [json.loads(line[6:]) for line in response.text.splitlines() if line[:6] == "data: "]

    response = {"input": "Hello"}
    assert (await post(running, "/v1/responses", response))["output"] == []
    assert (await events("/v1/responses", response))[-1]["response"]["output"] == []
    message = {"messages": [USER], "max_tokens": 9}
    assert (await post(running, "/v1/messages", message))["content"] == []
    kinds = [event["type"] for event in await events("/v1/messages", message)]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
