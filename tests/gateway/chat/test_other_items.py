"""POST /v1/responses: items and parts of talks that began elsewhere, and tools on the way."""

import json
from typing import Any

import pytest

from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/responses"
WARNING = "x-pagewire-warning"
USER = {"role": "user", "content": "Hello"}
LEFT_OUT = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}},
    {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0K", "status": "completed"},
    {"type": "computer_call", "id": "cu_1", "call_id": "c", "action": {}, "status": "completed"},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "f"}]},
    {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "f"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "tool_search_call", "id": "t", "arguments": {}},
    {"type": "file_search_call", "id": "fs", "queries": ["q"], "results": None},
    {"type": "compaction", "id": "c", "encrypted_content": "x" * 40},
]
TOLD = [
    (
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "docs",
            "name": "read",
            "arguments": '{"page": 7}',
            "output": "page seven",
        },
        ('"name": "docs.read"', '"page": 7', "page seven"),
    ),
    (
        {
            "type": "file_search_call",
            "id": "fs_1",
            "queries": ["where"],
            "results": [{"text": "over there"}],
        },
        ('"name": "file_search"', "where", "over there"),
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "code": "print(9)",
            "outputs": [{"type": "logs", "logs": "nine"}],
        },
        ('"name": "code_interpreter"', "print(9)", "nine"),
    ),
]


async def prompt_of(running: Any, tokenizer: Any, *items: dict[str, Any], **fields: Any) -> str:
    await post(running, ROUTE, {"input": [USER, *items, USER]} | fields)
    ids = running.scheduler.prompt_of(-1)
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item["type"])
async def test_items_that_say_nothing_are_left_out_with_a_warning(
    item: dict[str, Any], running: Any, tokenizer: Any
) -> None:
    assert await prompt_of(running, tokenizer, item) == await prompt_of(running, tokenizer)
    answered = await running.http.post(ROUTE, json={"input": [USER, item]})
    assert item["type"] in answered.headers[WARNING]


@pytest.mark.parametrize(("item", "words"), TOLD, ids=lambda value: str(value)[:30])
async def test_what_another_server_ran_is_told_as_a_call_and_its_result(
    item: dict[str, Any], words: tuple[str, ...], running: Any, tokenizer: Any
) -> None:
    prompt = await prompt_of(running, tokenizer, item)
    assert all(word in prompt for word in words)
    answered = await running.http.post(ROUTE, json={"input": [USER, item]})
    assert item["type"] in answered.headers[WARNING]


@pytest.mark.parametrize(
    ("kind", "field", "name"),
    [
        ("local_shell_call", "action", "local_shell"),
        ("shell_call", "action", "shell"),
        ("apply_patch_call", "operation", "apply_patch"),
    ],
)
async def test_what_the_caller_ran_is_a_call_and_its_result(
    kind: str, field: str, name: str, running: Any, tokenizer: Any
) -> None:
    call = {"type": kind, "id": "i", "call_id": "c", field: {"command": ["ls", "-l"]}}
    result = {"type": f"{kind}_output", "call_id": "c", "output": [{"stdout": "a.txt"}]}
    prompt = await prompt_of(running, tokenizer, call, result)
    assert f'"name": "{name}"' in prompt and '"ls", "-l"' in prompt and "a.txt" in prompt
    answered = await running.http.post(ROUTE, json={"input": [USER, call, result]})
    assert WARNING not in answered.headers


async def test_strict_requests_refuse_what_ran_elsewhere(start: Any) -> None:
    running = await start(strict_requests=True)
    for item in (LEFT_OUT[0], TOLD[0][0]):
        assert (await refusal(running, ROUTE, {"input": [USER, item]}))[:2] == (
            400,
            "input[1].type",
        )


async def test_a_kind_of_item_that_changes_the_conversation_is_refused(running: Any) -> None:
    for kind in ("compaction_trigger", "configuration_update", "nonsense"):
        asked = {"input": [USER, {"type": kind}]}
        assert (await refusal(running, ROUTE, asked))[:2] == (400, "input[1].type")


async def test_tools_that_are_added_or_found_on_the_way_are_tools(
    running: Any, tokenizer: Any, encode: Any
) -> None:
    running.scheduler.output = encode(
        '<tool_call>\n{"name": "late", "arguments": {}}\n</tool_call>'
    )
    late = {"type": "function", "name": "late"}
    for item in (
        {"type": "additional_tools", "role": "developer", "tools": [late]},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [late]},
    ):
        asked = {"input": [USER, item, USER], "tools": [{"type": "function", "name": "soon"}]}
        answer = await post(running, ROUTE, asked)
        assert [entry["type"] for entry in answer["output"]] == ["function_call"]
        head = tokenizer.decode(running.scheduler.prompt_of(-1), skip_special_tokens=False)
        assert head.index("soon") < head.index("late") < head.index("Hello")


IMAGES = [{"type": "input_image", "image_url": ""}, {"type": "input_image"}]
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


@pytest.mark.parametrize("image", IMAGES, ids=json.dumps)
async def test_a_picture_whose_content_was_left_out_is_nothing(
    image: dict[str, Any], running: Any, tokenizer: Any
) -> None:
    def items(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        said = [{"type": "input_text", "text": "Seen."}, *parts]
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": said}
        return [call, output, {"role": "user", "content": said}]

    with_it = await prompt_of(running, tokenizer, *items(image))
    assert with_it == await prompt_of(running, tokenizer, *items())


async def test_a_chats_picture_whose_content_was_left_out_is_nothing(running: Any) -> None:
    text = {"type": "text", "text": "Seen."}
    prompts = []
    for image in (None, {"type": "image_url", "image_url": {"url": ""}}, {"type": "image_url"}):
        parts = [text] if image is None else [text, image]
        asked = {"messages": [{"role": "user", "content": parts}]}
        await post(running, "/v1/chat/completions", asked)
        prompts.append(running.scheduler.prompt_of(-1))
    assert prompts[0] == prompts[1] == prompts[2]


async def test_a_picture_is_refused_in_words_that_clients_go_on_after(running: Any) -> None:
    """Codex and Claude Code take it out of the conversation when they read them."""
    output = {"type": "function_call_output", "call_id": "c", "output": [PICTURE]}
    for item, place in (
        ({"role": "user", "content": [PICTURE]}, "input[1].content[0].type"),
        (output, "input[1].output[0].type"),
    ):
        status, param, message = await refusal(running, ROUTE, {"input": [USER, item]})
        assert (status, param) == (400, place)
        assert "The image data you provided does not represent a valid image" in message
        assert "could not process image" in message
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    chat = {"messages": [{"role": "user", "content": [picture]}]}
    status, param, message = await refusal(running, "/v1/chat/completions", chat)
    assert (status, param) == (400, "messages[0].content[0].type")
    assert "could not process image" in message
