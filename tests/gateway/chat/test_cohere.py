"""Cohere's `/v2/chat` and `/v2/embed`, below `/cohere` too."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from simulator.workers.prompt_outputs import hidden_of
from tests.gateway.http_calls import accepts, post, telling_logprobs
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, EMBED = "/v2/chat", "/v2/embed"
USER: Any = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = "The capital of France is Paris."


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data says."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("route", [CHAT, "/cohere/v2/chat"])
async def test_an_answer_in_coheres_form(route: str, running: Any, encode: Any) -> None:
    running.scheduler.output = encode("Sunny.")
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = await post(running, route, {"model": "tiny", "messages": turns})
    assert answer["message"] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Sunny."}],
    }
    assert answer["finish_reason"] == "COMPLETE" and answer["id"].startswith("chat-")
    prompt, output = len(running.scheduler.prompt_of(-1)), len(running.scheduler.output)
    counts = {"input_tokens": prompt, "output_tokens": output}
    assert answer["usage"]["tokens"] == answer["usage"]["billed_units"] == counts


async def test_every_parameter_reaches_the_sampler(running: Any) -> None:
    fields = {"temperature": 0.5, "p": 0.75, "k": 5, "seed": 7, "max_tokens": 9}
    fields |= {"frequency_penalty": 0.25, "presence_penalty": 0.5, "stop_sequences": ["x"]}
    await post(running, CHAT, {"messages": [USER]} | fields)
    sampling = running.scheduler.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 5)
    assert (sampling.seed, sampling.max_tokens) == (7, 9)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, 0.5)


async def test_calls_and_their_results(running: Any, encode: Any, weather: Any) -> None:
    running.scheduler.output = encode(f"Let me look. {CALL}")
    body = {"messages": [USER], "tools": [weather]}
    answer = await post(running, CHAT, body)
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "TOOL_CALL"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    document = {"type": "document", "document": {"id": "1", "data": {"sky": "clear"}}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": [document]}
    turn = {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call], "citations": []}
    running.scheduler.output = encode("Sunny.")
    answer = await post(running, CHAT, {"messages": [USER, turn, result], "tools": [weather]})
    assert answer["finish_reason"] == "COMPLETE"


async def test_a_stream_of_text_and_calls(running: Any, encode: Any, weather: Any) -> None:
    running.scheduler.output = encode(f"Let me look. {CALL}")
    body = {"messages": [USER], "tools": [weather], "stream": True}
    events = events_of(await running.http.post(CHAT, json=body))
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds == [
        *("message-start", "content-start", "content-delta", "content-end"),
        *("tool-call-start", "tool-call-delta", "tool-call-end", "message-end"),
    ]
    assert events[0]["delta"]["message"]["role"] == "assistant" and events[0]["id"]

    def joined(kind: str, *path: str) -> str:
        texts = []
        for event in events:
            value = event["delta"]["message"] if event["type"] == kind else None
            for name in path:
                value = None if value is None else value[name]
            texts.append(value or "")
        return "".join(texts)

    assert joined("content-delta", "content", "text").strip() == "Let me look."
    arguments = joined("tool-call-delta", "tool_calls", "function", "arguments")
    assert json.loads(arguments) == {"city": "Paris"}
    end = events[-1]["delta"]
    assert end["finish_reason"] == "TOOL_CALL" and end["usage"]["tokens"]["output_tokens"] > 0


async def test_thoughts_are_pieces_of_their_own(running: Any, encode: Any) -> None:
    running.scheduler.output = encode("<think>\nHm.\n</think>\n\nSunny.")
    answer = await post(running, CHAT, {"messages": [USER]})
    assert answer["message"]["content"] == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Sunny."},
    ]
    events = events_of(await running.http.post(CHAT, json={"messages": [USER], "stream": True}))
    starts = [event for event in events if event["type"] == "content-start"]
    assert [event["delta"]["message"]["content"]["type"] for event in starts] == [
        "thinking",
        "text",
    ]
    assert [event["index"] for event in starts] == [0, 1]


async def test_log_probabilities_of_the_tokens(running: Any, encode: Any) -> None:
    def tell(ids: Any, num_top: int) -> LogprobColumns:
        none = np.zeros((len(ids), num_top), np.int32)
        ranks, logprobs = np.ones(len(ids), np.int32), np.float32(ids) / -4
        rows = np.arange(len(ids))
        return LogprobColumns(rows, logprobs, ranks, none, none.astype(np.float32))

    running.scheduler.output = ids = encode("Sunny.")
    with telling_logprobs(running.scheduler, tell):
        body = {"messages": [USER], "logprobs": True}
        answer = await post(running, CHAT, body)
        events = events_of(await running.http.post(CHAT, json=body | {"stream": True}))
    assert "".join(one["text"] for one in answer["logprobs"]) == "Sunny."
    streamed = [event["logprobs"] for event in events if "logprobs" in event]
    for found in (answer["logprobs"], streamed):
        assert [token_id for one in found for token_id in one["token_ids"]] == ids
        logprobs = [logprob for one in found for logprob in one["logprobs"]]
        assert logprobs == [token_id / -4 for token_id in ids]


@pytest.mark.parametrize("name", ["json_schema", "schema"])
async def test_a_form_of_the_answer(name: str, running: Any, tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_object", name: schema}
    await post(running, CHAT, {"messages": [USER], "response_format": form})
    assert accepts(running, tokenizer, '{"a": 1}') and not accepts(running, tokenizer, '{"a": ""}')
    await post(running, CHAT, {"messages": [USER], "response_format": {"type": "json_object"}})
    assert accepts(running, tokenizer, '{"b": []}') and not accepts(running, tokenizer, "1")


async def test_strict_tools_and_a_call_that_is_required(
    running: Any, tokenizer: Any, weather: Any
) -> None:
    body = {"messages": [USER], "tools": [weather]}
    await post(running, CHAT, body | {"strict_tools": True})
    assert accepts(running, tokenizer, CALL)
    assert not accepts(running, tokenizer, CALL.replace('"Paris"', "5"))
    await post(running, CHAT, body | {"tool_choice": "REQUIRED"})
    assert accepts(running, tokenizer, '[{"name": "get_weather", "parameters": {"city": "Rome"}}]')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [USER] * 1025}, "messages"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"documents": ["a text"]}, "documents"),
        ({"documents": ["a"] * 1025}, "documents"),
        ({"citation_options": {"mode": "ACCURATE"}}, "citation_options"),
        ({"safety_mode": "STRICT"}, "safety_mode"),
        ({"raw_prompting": True}, "raw_prompting"),
        ({"p": 2.0}, "p"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "disabled", "token_budget": 5}}, "thinking.token_budget"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"requird": []}}},
            "response_format.json_schema.requird",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str | None, running: Any
) -> None:
    response = await running.http.post(CHAT, json={"messages": [USER]} | fields)
    if param is None:  # a picture that was taken out is nothing
        assert response.status_code == 200
        return
    found = response.json()
    assert response.status_code == 400 and found["error"]["param"] == param, found
    assert found["message"] == found["error"]["message"]


def vector_of(token_ids: list[int]) -> np.ndarray:
    state = hidden_of(np.array(token_ids), 0).astype(np.float64)[-1]
    return state / np.linalg.norm(state)


@pytest.mark.parametrize("route", [EMBED, "/cohere/v2/embed"])
async def test_vectors_in_each_form(route: str, running: Any, encode: Any) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "tiny", "texts": [TEXT, "Hello"], "embedding_types": kinds}
    answer = await post(running, route, body | {"input_type": "search_document"})
    assert answer["response_type"] == "embeddings_by_type" and answer["texts"] == body["texts"]
    num_tokens = len(encode(TEXT)) + len(encode("Hello"))
    assert answer["meta"]["billed_units"] == {"input_tokens": num_tokens}
    found = answer["embeddings"]
    assert list(found) == kinds
    for at, text in enumerate(body["texts"]):
        vector = vector_of(encode(text))
        assert found["float"][at] == pytest.approx(vector, abs=1e-6)
        packed = np.frombuffer(base64.b64decode(found["base64"][at]), "<f4")
        assert packed.tolist() == found["float"][at]
        whole = np.array(found["int8"][at])
        assert np.abs(whole / 127 - vector).max() <= 0.5 / 127 + 1e-6 and whole.max() <= 127
        assert found["uint8"][at] == (whole + 128).tolist()
        bits = np.unpackbits(np.array(found["ubinary"][at], np.uint8))[: len(vector)]
        assert bits.tolist() == (np.array(found["float"][at]) > 0).tolist()
        assert found["binary"][at] == [byte - 128 for byte in found["ubinary"][at]]


async def test_inputs_in_pieces_and_a_text_that_is_cut(running: Any, encode: Any) -> None:
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await post(running, EMBED, {"inputs": [{"content": pieces}]})
    assert answer["texts"] == ["a\nb"] and list(answer["embeddings"]) == ["float"]
    ids = encode(TEXT)
    for side, kept in (("START", ids[-2:]), ("END", ids[:2])):
        await post(running, EMBED, {"texts": [TEXT], "truncate": side, "max_tokens": 2})
        assert running.scheduler.prompt_of(-1) == kept
    size = len(answer["embeddings"]["float"][0])
    await post(running, EMBED, {"texts": [TEXT], "output_dimension": size})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": None}, "texts"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"inputs": [{"content": []}]}, "inputs"),
        ({"images": ["data:"]}, "images"),
        ({"input_type": "image"}, "input_type"),
        ({"input_type": "other"}, "input_type"),
        ({"embedding_types": ["float"] * 7}, "embedding_types"),
        ({"embedding_types": ["int4"]}, "embedding_types[0]"),
        ({"output_dimension": 3}, "output_dimension"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"truncate": "NONE", "texts": ["Hello " * 5000]}, "texts"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    fields: dict[str, Any], param: str, running: Any
) -> None:
    response = await running.http.post(EMBED, json={"texts": ["Hello"]} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
