"""Render, generate and derender: together they are the chat or the completion itself."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gateway.http_calls import post, refusal, telling_logprobs
from wire import columns
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
TURNS = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 7}}</tool_call>'
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0, "max_tokens": 5},
    "sampled": {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": -1.5, "9": 2},
        "min_tokens": 1,
        "max_tokens": 20,
    },
    "lists": {
        "stop_token_ids": [5, 6],
        "allowed_token_ids": list(range(40)),
        "bad_words": ["how", "are you"],
        "ignore_eos": True,
        "cache_salt": "s",
    },
    "several": {"n": 3, "seed": 11},
    "a form": {"response_format": {"type": "json_object"}},
    "a choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "a call": {"tools": [TOOL], "tool_choice": "required"},
    "uncached": {"skip_prefix_cache": True},
}


def tell(ids: NDArray[np.int32], num_top: int) -> LogprobColumns:
    """Log probabilities that follow from the ids, with the next ids as alternatives."""
    top = ids[:, None] + np.arange(num_top)
    return LogprobColumns(np.arange(len(ids)), ids / -1024, ids + 1, top, top / -1024)


def asked(submit: Any) -> dict[str, Any]:
    """The requests of a submission, apart from ids and handles."""
    return {
        "prompt": columns.unpack(submit.prompt_token_ids).tolist(),
        "sampling": submit.sampling.SerializeToString(deterministic=True),
        "salt": submit.cache_salt,
        "skips_cache": submit.skip_prefix_cache,
    }


def submitted_since(running: Any, start: int) -> list[dict[str, Any]]:
    return [asked(submit) for submit in running.scheduler.submits[start:]]


@pytest.mark.parametrize("name", CHATS)
async def test_a_rendered_chat_is_submitted_as_the_chat_itself(running: Any, name: str) -> None:
    body = {"messages": TURNS} | CHATS[name]
    await post(running, CHAT, body)
    itself = submitted_since(running, 0)
    rendered = await post(running, f"{CHAT}/render", body)
    assert len(running.scheduler.submits) == len(itself), "rendering computes nothing"
    await post(running, GENERATE, rendered)
    assert submitted_since(running, len(itself)) == itself


async def test_each_prompt_of_a_completion_is_rendered(running: Any) -> None:
    body = {"prompt": ["Hello", [5, 6, 7]], "max_tokens": 3, "n": 2, "seed": 1}
    await post(running, COMPLETION, body)
    itself = submitted_since(running, 0)
    rendered = await post(running, f"{COMPLETION}/render", body)
    assert [one["token_ids"] for one in rendered] == [itself[0]["prompt"], [5, 6, 7]]
    for one in rendered:
        await post(running, GENERATE, one)
    again = submitted_since(running, len(itself))
    assert sorted(again, key=str) == sorted(itself, key=str)


@pytest.mark.parametrize("text", ["Hello world, how are you?", CALL, f"Look: {CALL}"])
async def test_the_three_steps_give_the_answer_of_the_chat(
    running: Any, encode: Callable[[str], list[int]], text: str
) -> None:
    running.scheduler.output = encode(text)
    body = {"messages": TURNS, "tools": [TOOL]}
    whole = await post(running, CHAT, body)
    rendered = await post(running, f"{CHAT}/render", body)
    generated = await post(running, GENERATE, rendered)
    assert [choice["token_ids"] for choice in generated["choices"]] == [encode(text)]
    answer = await post(
        running,
        f"{CHAT}/derender",
        {
            "generate_response": generated,
            "prompt_token_ids": rendered["token_ids"],
            "chat_request": body,
        },
    )
    assert answer["id"] == generated["request_id"]
    (ours,), (theirs,) = answer["choices"], whole["choices"]
    for call in (
        *(ours["message"].get("tool_calls", [])),
        *theirs["message"].get("tool_calls", []),
    ):
        call.pop("id")
    assert ours == theirs
    counts = "prompt_tokens", "completion_tokens", "total_tokens"
    assert [answer["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


async def test_log_probabilities_come_through_the_three_steps(running: Any, encode: Any) -> None:
    running.scheduler.output = encode("Hello 日本")
    body = {"messages": TURNS, "logprobs": True, "top_logprobs": 2}
    with telling_logprobs(running.scheduler, tell):
        whole = await post(running, CHAT, body)
        rendered = await post(running, f"{CHAT}/render", body)
        generated = await post(running, GENERATE, rendered)
        assert running.scheduler.submits[-1].sampling.logprobs == 2
    names = [entry["token"] for entry in generated["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{number}" for number in running.scheduler.output]
    answer = await post(
        running, f"{CHAT}/derender", {"generate_response": generated, "chat_request": body}
    )
    assert answer["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]


async def test_a_stop_string_of_the_request_cuts_the_text(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("Hello world, how")
    generated = {"request_id": "r", "choices": [{"token_ids": encode("Hello world, how")}]}
    body = {"generate_responses": [generated], "completion_request": {"prompt": "x", "stop": ","}}
    answer = await post(running, f"{COMPLETION}/derender", body)
    assert answer["choices"][0]["text"] == "Hello world"


async def test_choices_of_several_prompts_are_counted_on(running: Any, encode: Any) -> None:
    texts = ["Hello", " world", "how"]
    answers = [
        {"request_id": "a", "choices": [{"token_ids": encode(text)} for text in texts[:2]]},
        {
            "request_id": "b",
            "choices": [{"token_ids": encode(texts[2]), "finish_reason": "length"}],
        },
    ]
    body = {"generate_responses": answers, "prompt_tokens": [3, 4]}
    answer = await post(running, f"{COMPLETION}/derender", body)
    shown = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert shown == list(enumerate(texts))
    assert answer["choices"][2]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 7


async def test_named_ids_of_log_probabilities_become_text(running: Any, encode: Any) -> None:
    (first, *_) = encode("Hello")
    entry = {"token": f"token_id:{first}", "logprob": -0.5}
    choice = {
        "token_ids": [first],
        "logprobs": {"content": [entry | {"top_logprobs": [entry]}]},
    }
    generated = {"request_id": "r", "choices": [choice]}
    answer = await post(running, f"{CHAT}/derender", {"generate_response": generated})
    (token,) = answer["choices"][0]["logprobs"]["content"]
    spelling = token["token"].encode()
    assert b"Hello".startswith(spelling) and token["bytes"] == list(spelling)
    assert token["top_logprobs"][0]["token"] == token["token"]


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_has_the_ids_of_the_whole_answer(
    running: Any, encode: Any, mode: str
) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "output_mode": mode,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await running.http.post(GENERATE, json=body)
    *events, done = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    assert {chunk["output_mode"] for chunk in (*chunks, last)} == {mode}
    ids = [number for chunk in chunks for number in chunk["choices"][0]["token_ids"]]
    assert ids == encode("Hello world")
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 3
    texts = [choice.get("text") for chunk in chunks for choice in chunk["choices"]]
    assert set(texts) == {None} if mode == "tokens" else "".join(texts) == "Hello world"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (GENERATE, {}, "token_ids"),
        (GENERATE, {"token_ids": []}, "prompt"),
        (GENERATE, {"token_ids": [5, 1 << 40]}, "prompt"),
        (GENERATE, {"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        (GENERATE, {"token_ids": [5], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (GENERATE, {"token_ids": [5], "output_mode": "pictures"}, "output_mode"),
        (
            GENERATE,
            {"token_ids": [5], "sampling_params": {"stream": True}},
            "sampling_params.stream",
        ),
        (
            GENERATE,
            {"token_ids": [5], "sampling_params": {"structured_outputs": {"llguidance": "{}"}}},
            "structured_outputs.llguidance",
        ),
        (f"{CHAT}/derender", {}, "generate_response"),
        (
            f"{CHAT}/derender",
            {"generate_response": {"request_id": "r", "choices": []}},
            "generate_response.choices",
        ),
        (
            f"{CHAT}/derender",
            {"generate_response": {"request_id": "r", "choices": [{"token_ids": []}]}},
            "generate_response.choices[0].token_ids",
        ),
        (
            f"{CHAT}/derender",
            {
                "generate_response": {"request_id": "r", "choices": [{"token_ids": [1]}]},
                "stream": 1,
            },
            "stream",
        ),
        (
            f"{COMPLETION}/derender",
            {
                "generate_responses": [{"request_id": "r", "choices": [{"token_ids": [9]}]}],
                "prompt_tokens": [1, 2],
            },
            "prompt_tokens",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    running: Any, route: str, body: dict[str, Any], param: str
) -> None:
    status, named, _ = await refusal(running, route, body)
    assert (status, named) == (400, param)


async def test_an_unknown_model_is_not_found(running: Any) -> None:
    for route, body in (
        (GENERATE, {"token_ids": [5]}),
        (f"{CHAT}/derender", {"generate_response": {"request_id": "r", "choices": []}}),
    ):
        status, named, _ = await refusal(running, route, body | {"model": "other"})
        assert (status, named) == (404, "model")
