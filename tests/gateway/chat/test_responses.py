"""POST /v1/responses through the openai package: text, reasoning, calls, streamed and not."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

from pagewire.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nA tool will know.\n</think>\n\nWait.\n{CALL}\n{CALL}"


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.http_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def tool(weather: dict[str, Any]) -> Any:
    return {"type": "function"} | weather["function"]


async def test_text_is_answered_and_counted(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]]
) -> None:
    answer = await client.responses.create(
        model="tiny",
        instructions="Be brief.",
        input="Hello",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        metadata={"a": "b"},
    )
    assert (answer.status, answer.output_text) == ("completed", "Hello world")
    assert answer.id.startswith("resp_")
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(encode("Hello world"))
    assert answer.usage.input_tokens_details.cached_tokens == 3
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert running.scheduler.prompt_of(0) == encode(turns + "<|im_start|>assistant\n")
    sampling = running.scheduler.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)


async def test_an_answer_that_was_cut_off_is_incomplete(
    client: openai.AsyncOpenAI, running: Any
) -> None:
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    answer = await client.responses.create(model="tiny", input="Hello")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


async def test_an_answer_that_somebody_aborted_did_not_reach_its_limit(
    client: openai.AsyncOpenAI, running: Any
) -> None:
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_ABORT}
    answer = await client.responses.create(model="tiny", input="Hello")
    assert (answer.status, answer.incomplete_details) == ("incomplete", None)


async def test_the_events_of_a_stream_tell_the_whole_response(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]], tool: Any
) -> None:
    running.scheduler.output = encode(ANSWER)
    whole = await client.responses.create(model="tiny", input="Hello", tools=[tool])
    stream = await client.responses.create(model="tiny", input="Hello", tools=[tool], stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"

    def texts(kind: str) -> list[str]:
        """Deltas joined by item."""
        joined: dict[str, str] = {}
        for event in events:
            if event.type == kind:
                joined[event.item_id] = joined.get(event.item_id, "") + event.delta
        return list(joined.values())

    assert texts("response.reasoning_text.delta") == ["A tool will know."]
    assert texts("response.output_text.delta") == ["Wait."]
    assert texts("response.function_call_arguments.delta") == [ARGUMENTS] * 2
    opened = [event.item for event in events if event.type == "response.output_item.added"]
    closed = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in opened] == [item.id for item in closed]
    last = events[-1].response
    assert last.output == closed

    def said(response: Any) -> list[Any]:
        ids = {"id", "call_id", "created_at"}
        return [item.model_dump(exclude=ids) for item in response.output]

    assert said(last) == said(whole)
    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert last.usage == whole.usage
    assert whole.usage is not None
    # The markers and the space between them count, as they are in the output's own tokens.
    thought = len(encode("<think>\nA tool will know.\n</think>"))
    assert whole.usage.output_tokens_details.reasoning_tokens == thought


async def test_reasoning_counts_no_more_tokens_than_the_output_wherever_it_is_cut(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]]
) -> None:
    """Within a character, too, and within a marker."""
    token_ids = encode("<think>\nA tööl 😀 will know.\n</think>\n\nWait.")
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    for count in range(1, len(token_ids) + 1):
        running.scheduler.output = token_ids[:count]
        usage = (await client.responses.create(model="tiny", input="Hello")).usage
        assert usage is not None and usage.output_tokens == count
        assert usage.output_tokens_details.reasoning_tokens <= count


async def test_the_clients_helper_follows_the_stream(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]]
) -> None:
    async with client.responses.stream(model="tiny", input="Hello") as stream:
        pieces = [event.delta async for event in stream if event.type.endswith("text.delta")]
        final = await stream.get_final_response()
    assert "".join(pieces) == final.output_text == "Hello world"
    assert len(pieces) > 1


async def test_an_answer_and_the_results_of_its_calls_can_be_sent_back(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]], tool: Any
) -> None:
    running.scheduler.output = encode(ANSWER)
    first = await client.responses.create(model="tiny", input="Weather?", tools=[tool])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
        for item in first.output
        if item.type == "function_call"
    ]
    history: Any = [{"role": "user", "content": "Weather?"}]
    history += [item.model_dump() for item in first.output] + results
    running.scheduler.output = encode("Rain.")
    second = await client.responses.create(model="tiny", input=history, tools=[tool])
    assert second.output_text == "Rain."

    calls = [
        {
            "id": result["call_id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
        for result in results
    ]
    turn = {"role": "assistant", "content": "Wait.", "tool_calls": calls}
    chat: Any = [
        {"role": "user", "content": "Weather?"},
        turn | {"reasoning_content": "A tool will know."},
        *({"role": "tool", "content": "Rain.", "tool_call_id": call["id"]} for call in calls),
    ]
    wrapped: Any = [{"type": "function", "function": {k: tool[k] for k in tool if k != "type"}}]
    await client.chat.completions.create(model="tiny", messages=chat, tools=wrapped)
    assert running.scheduler.prompt_of(1) == running.scheduler.prompt_of(2)


async def test_text_may_be_held_to_a_schema(client: openai.AsyncOpenAI, running: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = await client.responses.create(model="tiny", input="Hello", text={"format": form})
    assert answer.text is not None
    assert answer.text.format.model_dump(by_alias=True, exclude_none=True) == form
    chat: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], response_format=chat
    )
    first, second = (submit.sampling.grammar for submit in running.scheduler.submits)
    assert first == second != ""
    bad: Any = {"type": "json_schema", "name": "x", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.create(model="tiny", input="Hello", text={"format": bad})
    assert refusal.value.param == "text.format.schema"


async def test_the_extras_of_chats_do_what_they_do_there(running: Any) -> None:
    extras: dict[str, Any] = {
        "stop_token_ids": [7],
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stop": ["world"],
        "logit_bias": {"5": 1.5},
        "structured_outputs": {"choice": ["Hello world"]},
        "chat_template_kwargs": {"enable_thinking": False},
        "cache_salt": "a",
        "skip_prefix_cache": True,
        "skip_speculation": True,
        "request_id": "mine",
    }
    answered = await running.http.post("/v1/responses", json={"input": "Hi"} | extras)
    assert answered.json()["id"] == "mine"
    assert answered.json()["output"][0]["content"][0]["text"] == "Hello world"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -1}
    await running.http.post("/v1/chat/completions", json=chat | extras)
    await running.http.post("/v1/responses", json={"input": "Hi", "ignore_eos": True})
    first, second, endless = running.scheduler.submits
    for submit in (first, second):
        submit.handle = 0
        submit.sampling.ClearField("max_tokens")
    assert first == second and first.sampling.grammar
    assert endless.sampling.ignore_eos


async def test_a_failure_half_way_is_the_clients_error(
    client: openai.AsyncOpenAI, running: Any
) -> None:
    running.scheduler.hangs_after = 1
    stream = await client.responses.create(model="tiny", input="Hello", stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        async for event in stream:
            if event.type == "response.output_text.delta":
                running.scheduler.end = {
                    "reason": types_pb2.FINISH_REASON_ERROR,
                    "status_code": 13,
                    "message": "it broke",
                }
                running.scheduler.finish_hanging()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("store", {"store": True}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("input", {"input": []}),
        ("tools[0].type", {"tools": [{"type": "web_surch"}]}),
        ("text.format.type", {"text": {"format": {"type": "no such format"}}}),
        ("text.no_such_field", {"text": {"no_such_field": 1}}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("temperature", {"temperature": 3}),
        (
            "structured_outputs",
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    field: str, fields: dict[str, Any], running: Any
) -> None:
    response = await running.http.post("/v1/responses", json={"input": "Hello"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


HOSTED = [
    *("web_search", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "mcp"),
    *("image_generation", "computer_use_preview", "local_shell", "shell", "apply_patch"),
]


@pytest.mark.parametrize("kind", HOSTED)
async def test_tools_that_a_server_would_run_are_left_out_with_a_warning(
    kind: str, running: Any
) -> None:
    function = {"type": "function", "name": "f"}
    prompts = []
    for tools in ([function], [{"type": kind, "external_web_access": False}, function]):
        answered = await running.http.post("/v1/responses", json={"input": "a", "tools": tools})
        assert answered.status_code == 200, answered.text
        assert [tool["name"] for tool in answered.json()["tools"]] == ["f"]
        assert (kind in answered.headers.get("x-pagewire-warning", "")) is (len(tools) == 2)
        prompts.append(running.scheduler.prompt_of(-1))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("kind", HOSTED)
async def test_tools_that_a_server_would_run_cannot_be_forced(kind: str, running: Any) -> None:
    tools = [{"type": kind}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": tools}
    for choice in ({"type": kind}, "required", allowed):
        asked = {"input": "Hello", "tools": tools, "tool_choice": choice}
        refused = await running.http.post("/v1/responses", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    ("route", "base", "function"),
    [
        ("/v1/responses", {"input": "a"}, {"type": "function", "name": "f"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            {"type": "function", "function": {"name": "f"}},
        ),
    ],
)
async def test_strict_requests_refuse_tools_that_a_server_would_run(
    route: str, base: Any, function: Any, start: Any, running: Any
) -> None:
    tools = [function, {"type": "web_search"}]
    lenient = await running.http.post(route, json=base | {"tools": tools})
    assert "tools[1].type" in lenient.headers["x-pagewire-warning"]
    strict = await start(strict_requests=True)
    refused = await strict.http.post(route, json=base | {"tools": tools})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[1].type"
