"""Tools and reasoning over HTTP, streamed and not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.chat.parts import CallArguments, CallStart
from gateway.http.events import CHAT, ChunkWriter
from gateway.request.generation import OutputDelta
from gateway.text.logprobs import Candidate, OutputTokenLogprobs
from pagewire.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather in Paris?"}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nA tool will know.\n</think>\n\n"


async def ask(running: Any, **fields: Any) -> Any:
    response = await running.http.post(ROUTE, json={"messages": [USER]} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def refusal(running: Any, **fields: Any) -> tuple[str, str, str]:
    response = await running.http.post(ROUTE, json={"messages": [USER]} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


async def stream(running: Any, **fields: Any) -> list[Any]:
    """The choices of a stream's chunks."""
    body = {"messages": [USER], "stream": True} | fields
    choices = []
    async with running.http.stream("POST", ROUTE, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                choices.append(json.loads(data)["choices"][0])
    return choices


async def test_a_tool_call_is_no_content(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(CALL)
    choice = await ask(running, tools=[weather])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ARGUMENTS},
    }


async def test_a_streamed_tool_call_gives_its_name_first_and_its_arguments_in_pieces(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(f"Let me look.\n{CALL}\n{CALL}")
    choices = await stream(running, tools=[weather])
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    for index in (0, 1):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert len(rest) > 1
        assert all(set(piece) == {"index", "function"} for piece in rest)
        assert "".join(piece["function"]["arguments"] for piece in rest) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert len({piece["id"] for piece in pieces if "id" in piece}) == 2


async def test_a_call_that_was_cut_off_ends_by_length(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(CALL)[:-9]
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    choice = await ask(running, tools=[weather])
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_without_tools_the_same_text_is_content(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(CALL)
    for fields in ({}, {"tools": []}, {"tools": [weather], "tool_choice": "none"}):
        choice = await ask(running, **fields)
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_one_call_alone_when_calls_may_not_be_parallel(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(f"{CALL}\n{CALL}")
    both = await ask(running, tools=[weather])
    assert len(both["message"]["tool_calls"]) == 2
    one = await ask(running, tools=[weather], parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1


async def test_a_conversation_with_calls_and_results_reaches_the_model(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ARGUMENTS},
    }
    turns = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "A tool will know.",
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    await ask(running, messages=turns, tools=[weather], max_tokens=5)
    prompt = running.gateway._pipeline._tokenizer.decode(
        running.scheduler.prompt_of(0), skip_special_tokens=False
    )
    assert f"{THOUGHT}{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool [call_1]\nRain.<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_is_no_content(
    is_streamed: bool, running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(f"{THOUGHT}Wait.\n{CALL}")

    async def read(**fields: Any) -> tuple[str | None, str, int]:
        if not is_streamed:
            message = (await ask(running, **fields))["message"]
            calls = message.get("tool_calls", ())
            return message.get("reasoning_content"), message["content"], len(calls)
        deltas = [choice["delta"] for choice in await stream(running, **fields)]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        num_calls = sum("id" in call for delta in deltas for call in delta.get("tool_calls", ()))
        return reasoning or None, content, num_calls

    assert await read(tools=[weather]) == ("A tool will know.", "Wait.", 1)
    assert await read() == ("A tool will know.", f"Wait.\n{CALL}", 0)
    assert await read(include_reasoning=False) == (None, f"Wait.\n{CALL}", 0)


async def test_log_probabilities_of_a_call_come_before_it() -> None:
    writer = ChunkWriter(CHAT, {"id": "a"}, num_choices=1)
    sampled = Candidate(5, -0.5, 1, b"x")
    delta = OutputDelta(
        "x",
        [5],
        logprobs=(OutputTokenLogprobs(sampled, (), 0),),
        parts=(CallStart(0, "call_1", "f"), CallArguments(0, "{}")),
    )
    chunks = [json.loads(line[6:]) for line in writer.chunk(0, delta).split(b"\n\n") if line]
    first, *calls = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {}
    assert first["logprobs"]["content"][0]["logprob"] == -0.5
    assert [list(choice["delta"]) for choice in calls] == [["tool_calls"], ["tool_calls"]]
    assert all(choice["logprobs"] is None for choice in calls)


async def test_what_cannot_be_done_with_tools_is_refused_by_name(
    running: Any, weather: dict[str, Any]
) -> None:
    unsupported, invalid = "unsupported_parameter", "invalid_value"
    named = {"type": "function", "function": {"name": "other"}}
    custom = {"type": "custom", "custom": {"name": "x"}}
    nothing = {"type": "allowed_tools", "allowed_tools": {}}
    unknown = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": unknown}
    grammar = {"type": "grammar"}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("tools[0].type", unsupported, {"tools": [custom]}),
        ("tools[1].function.name", invalid, {"tools": [weather, weather]}),
        ("tool_choice", invalid, {"tools": [weather], "tool_choice": "sometimes"}),
        ("tool_choice", invalid, {"tools": [weather], "tool_choice": named}),
        ("tool_choice", invalid, {"tool_choice": "required"}),
        ("tool_choice.type", unsupported, {"tools": [weather], "tool_choice": grammar}),
        ("tool_choice.allowed_tools", invalid, {"tools": [weather], "tool_choice": nothing}),
        ("tool_choice", invalid, {"tools": [weather], "tool_choice": allowed}),
        (
            "chat_template_kwargs.messages",
            unsupported,
            {"chat_template_kwargs": {"messages": 1}},
        ),
        ("messages[0].content", invalid, {"messages": [{"role": "user"}]}),
        (
            "continue_final_message",
            invalid,
            {"continue_final_message": True, "add_generation_prompt": True},
        ),
    ]
    for field, code, fields in cases:
        assert (await refusal(running, **fields))[:2] == (field, code), fields
    assert not running.scheduler.submits


async def test_the_template_hears_what_the_request_says(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    turn = "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
    expected = {
        turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n": {
            "chat_template_kwargs": {"enable_thinking": False}
        },
        turn: {"add_generation_prompt": False},
        turn.removesuffix("<|im_end|>\n"): {"continue_final_message": True},
    }
    for index, (prompt, fields) in enumerate(expected.items()):
        await ask(running, **fields)
        assert running.scheduler.prompt_of(index) == encode(prompt)


async def test_a_conversation_with_tools_is_tokenized_as_it_is_submitted(
    running: Any, weather: dict[str, Any]
) -> None:
    body = {"messages": [USER], "tools": [weather]}
    await ask(running, **body)
    response = await running.http.post("/tokenize", json=body)
    assert response.json()["tokens"] == running.scheduler.prompt_of(0)
    refused = await running.http.post("/tokenize", json={"prompt": "x", "tools": [weather]})
    assert refused.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_arguments_between_tags_are_open_only_where_the_output_was_cut_off(
    is_cut: bool, start: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running = await start(tool_call_parser="qwen3_coder")
    running.scheduler.output = encode(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis"
    )
    if is_cut:
        running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    choice = await ask(running, tools=[weather])
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == ('{"city": "Paris' if is_cut else '{"city": "Paris"}')
    assert choice["finish_reason"] == ("length" if is_cut else "tool_calls")
    pieces = [
        piece["function"]["arguments"]
        for one in await stream(running, tools=[weather])
        for piece in one["delta"].get("tool_calls", ())
    ]
    assert "".join(pieces) == call["function"]["arguments"]
