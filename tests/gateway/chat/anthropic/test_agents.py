"""POST /v1/messages as agents send it: what asks for nothing, what is left out, what is edited."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.tokens.tokenizer import Tokenizer
from tests.gateway.conftest import Running, end_gateway, run_gateway, until_ready
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WARNING = "x-pagewire-warning"
USER = {"role": "user", "content": "Hello"}
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.{}; cc_entrypoint=cli; cch={};"
CLEAR_THINKING, CLEAR_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
NO_REASONING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 8, "messages": [USER]} | fields


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": f"p{number}"}}


def result(number: int) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"seen {number}."}


def session(num_uses: int) -> list[dict[str, Any]]:
    """A session in which each turn of the assistant thinks, and uses a tool once."""
    turns: list[dict[str, Any]] = [USER]
    for number in range(num_uses):
        thought = {"type": "thinking", "thinking": f"hm {number}.", "signature": "s"}
        turns.append({"role": "assistant", "content": [thought, use(number)]})
        turns.append({"role": "user", "content": [result(number)]})
    return turns


def edits(*asked: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": list(asked)}, "tools": [TOOL]}


@pytest.fixture
def prompt_of(running: Any, tokenizer: Any) -> Callable[[dict[str, Any]], Any]:
    async def prompt_of(fields: dict[str, Any]) -> str:
        await post(running, ROUTE, body(**fields))
        ids = running.scheduler.prompt_of(-1)
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return prompt_of


@pytest.mark.parametrize("behind", ["", "\nYou are an agent.", " You are an agent."])
@pytest.mark.parametrize("as_blocks", [False, True])
async def test_the_line_of_attribution_changes_no_prompt(
    as_blocks: bool, behind: str, prompt_of: Any
) -> None:
    """It is another one in each request, and nothing that follows it would be cached."""
    prompts = set()
    for number in range(3):
        line = BILLING.format(number, f"{number:05x}") + behind
        rest = [text("Be brief.")]
        system: Any = [text(line), *rest] if as_blocks else f"{line}\nBe brief."
        prompts.add(await prompt_of({"system": system}))
    (prompt,) = prompts
    assert "billing" not in prompt and "Be brief." in prompt
    assert ("You are an agent." in prompt) is bool(behind)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "{}"}, USER], "max_tokens": 5},
        ),
        ("/v1/responses", {"instructions": "{}", "input": [USER]}),
        ("/v1/responses", {"input": [{"role": "developer", "content": "{}"}, USER]}),
    ],
)
async def test_the_line_is_left_out_where_a_proxy_translates_it(
    route: str, fields: dict[str, Any], running: Any, tokenizer: Any
) -> None:
    prompts = []
    for words in ("Be brief.", f"{BILLING.format(1, 2)}\nBe brief.", BILLING.format(1, 2)):
        asked: Any = json.loads(json.dumps(fields).replace("{}", words.replace("\n", "\\n")))
        await post(running, route, asked)
        ids = running.scheduler.prompt_of(-1)
        prompts.append(tokenizer.decode(ids, skip_special_tokens=False))
    assert prompts[0] == prompts[1] and "billing" not in prompts[2]


@pytest.mark.parametrize(
    "words",
    [
        "Mind the x-anthropic-billing-header: cch=1;",
        "x-anthropic-billing-headers are sent.",
        "\nx-anthropic-billing-header: cch=1;",
    ],
)
async def test_text_that_only_speaks_of_the_line_stays(words: str, prompt_of: Any) -> None:
    assert words in await prompt_of({"system": words})


SERVER_USE = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
SEARCHED = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "x"}],
}
OPAQUE = [
    SERVER_USE,
    SEARCHED,
    {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": {"type": "x"}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s1", "content": {}},
    {"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m1", "content": "x", "is_error": False},
    {"type": "advisor_tool_result", "tool_use_id": "s1", "content": {}},
]


@pytest.mark.parametrize("block", OPAQUE, ids=lambda block: block["type"])
async def test_what_ran_on_another_server_is_left_out_with_a_warning(
    block: dict[str, Any], running: Any, prompt_of: Any
) -> None:
    def turns(*blocks: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}

    assert await prompt_of(turns(block, text("Found."))) == await prompt_of(turns(text("Found.")))
    answered = await running.http.post(ROUTE, json=body(**turns(block, text("Found."))))
    assert block["type"] in answered.headers[WARNING]


async def test_sealed_thoughts_are_left_out(running: Any, prompt_of: Any) -> None:
    sealed = {"type": "redacted_thinking", "data": "x" * 50}
    turns = [USER, {"role": "assistant", "content": [sealed, text("Hi.")]}, USER]
    assert "xxx" not in await prompt_of({"messages": turns})
    answered = await running.http.post(ROUTE, json=body(messages=turns))
    assert WARNING not in answered.headers


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "code_execution_20260521", "name": "code_execution"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
    ],
    ids=lambda tool: tool["type"],
)
async def test_tools_of_a_server_are_left_out_and_cannot_be_forced(
    tool: dict[str, Any], running: Any, prompt_of: Any, start: Any
) -> None:
    assert await prompt_of({"tools": [tool, TOOL]}) == await prompt_of({"tools": [TOOL]})
    answered = await running.http.post(ROUTE, json=body(tools=[tool, TOOL]))
    assert "tools[0].type" in answered.headers[WARNING]
    forced = {"type": "tool", "name": tool.get("name", "m")}
    refused = await running.http.post(ROUTE, json=body(tools=[tool, TOOL], tool_choice=forced))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    alone = await running.http.post(ROUTE, json=body(tools=[tool], tool_choice={"type": "any"}))
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tool_choice")


async def test_strict_requests_refuse_what_would_be_left_out(start: Any) -> None:
    running = await start(strict_requests=True)
    search = {"type": "web_search_20250305", "name": "web_search"}
    turns = [USER, {"role": "assistant", "content": [SERVER_USE, SEARCHED, text("a")]}, USER]
    for fields in ({"tools": [search, TOOL]}, {"messages": turns}):
        assert (await running.http.post(ROUTE, json=body(**fields))).status_code == 400


async def test_a_tool_that_is_named_wrongly_is_named(running: Any) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    broken = TOOL | {"input_schema": {"type": 5}, "strict": True}
    for tool, place in ((TOOL | {"name": ""}, "name"), (broken, "input_schema")):
        refused = await running.http.post(ROUTE, json=body(tools=[search, tool]))
        assert refused.json()["error"]["param"].startswith(f"tools[1].{place}"), refused.text


async def test_tools_that_are_found_or_added_on_the_way_are_tools(prompt_of: Any) -> None:
    deferred = TOOL | {"name": "later", "defer_loading": True}
    inline = {"type": "tool_definition", "definition": TOOL | {"name": "inline"}}
    found = result(0) | {"content": [{"type": "tool_reference", "tool_name": "later"}]}
    by_name = {"type": "tool_reference", "name": "look"}
    changes = [
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_removal", "tool": by_name},
    ]
    turns = [
        USER,
        {"role": "assistant", "content": [use(0)]},
        {"role": "user", "content": [found]},
        {"role": "system", "content": changes},
        USER,
    ]
    prompt = await prompt_of({"tools": [TOOL, deferred], "messages": turns})
    head, _, _ = prompt.partition("Hello")
    assert all(f'"name": "{name}"' in head for name in ("look", "later", "inline"))
    assert "The tool later can be called now." in prompt
    assert "The tool inline can be called now.\nThe tool look can no longer be called." in prompt


async def test_a_call_of_an_added_tool_is_a_call(running: Any, encode: Any) -> None:
    call = '<tool_call>\n{"name": "inline", "arguments": {}}\n</tool_call>'
    running.scheduler.output = encode(call)
    inline = {"type": "tool_definition", "definition": TOOL | {"name": "inline"}}
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": inline}]}
    answer = await post(running, ROUTE, body(messages=[USER, added, USER]))
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


async def test_what_the_system_says_for_one_turn_is_said_once(prompt_of: Any) -> None:
    once = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    kept = {"role": "system", "content": "Stay.", "clear_at": "never"}
    assert "Hurry." in await prompt_of({"messages": [USER, once, kept]})
    later = await prompt_of({"messages": [USER, once, kept, USER]})
    assert "Hurry." not in later and "Stay." in later


async def test_documents_and_results_of_a_search_that_are_text_are_text(prompt_of: Any) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The plan."}
    document = {"type": "document", "source": plain, "title": "Plan"}
    parts = {"type": "content", "content": [text("One"), text("Two")]}
    found = {"type": "search_result", "source": "s", "title": "T", "content": [text("Words")]}
    answer = result(0) | {"content": [found]}
    turns = [
        USER,
        {"role": "assistant", "content": [use(0)]},
        {"role": "user", "content": [answer, document, document | {"source": parts}]},
    ]
    prompt = await prompt_of({"messages": turns})
    for words in ("Plan\nThe plan.", "One\nTwo", "T\ns\nWords"):
        assert words in prompt


SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.mark.parametrize(
    "image",
    [
        {"type": "image"},
        {"type": "image", "source": None},
        {"type": "image", "source": SOURCE | {"data": ""}},
        {"type": "image", "source": {"type": "url", "url": ""}},
    ],
)
async def test_an_image_whose_content_was_left_out_is_nothing(image: Any, prompt_of: Any) -> None:
    def turns(*blocks: Any) -> dict[str, Any]:
        returned = result(0) | {"content": [text("Read."), *blocks]}
        called = {"role": "assistant", "content": [use(0)]}
        return {"messages": [USER, called, {"role": "user", "content": [returned, *blocks]}]}

    assert await prompt_of(turns(image)) == await prompt_of(turns())


async def test_an_image_is_refused_in_words_that_clients_go_on_after(running: Any) -> None:
    """Claude Code takes the file out of the conversation when it reads them."""
    for kind, words in (
        ("image", "could not process image"),
        ("document", "could not process pdf"),
    ):
        turn = {"role": "user", "content": [{"type": kind, "source": SOURCE}]}
        refused = await running.http.post(ROUTE, json=body(messages=[turn]))
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


@pytest_asyncio.fixture(loop_scope="module")
async def unthinking(
    model_folder: Path, tmp_path: Path, scheduler_server: Any
) -> AsyncIterator[Running]:
    """A gateway whose chat template knows neither reasoning nor tools."""
    template = tmp_path / "plain.jinja"
    template.write_text(NO_REASONING)
    tokenizer = Tokenizer.from_folder(model_folder, template)
    running = await run_gateway(model_folder, tokenizer, scheduler_server)
    await until_ready(running)
    yield running
    await end_gateway(running)


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
        {"thinking": {"type": "disabled"}},
        {"messages": [USER, {"role": "system", "output_config": {"effort": "low"}}]},
    ],
)
async def test_an_effort_asks_nothing_of_a_model_that_does_not_think(
    fields: dict[str, Any], unthinking: Running
) -> None:
    running = unthinking
    for route, base in ((ROUTE, body()), (COUNT, {"messages": [USER]})):
        answered = await running.http.post(route, json=base | fields)
        assert answered.status_code == 200, answered.text
        assert WARNING not in answered.headers
    extreme = {"output_config": {"effort": "extreme"}}
    assert (await running.http.post(ROUTE, json=body(**extreme))).status_code == 400


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "{}"}),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "{}"}}),
    ],
)
async def test_degrees_of_reasoning_are_told_to_have_no_effect_and_none_asks_for_nothing(
    route: str, fields: dict[str, Any], unthinking: Running
) -> None:
    for effort, warns in (("none", False), ("low", True), ("max", True)):
        asked: Any = json.loads(json.dumps(fields).replace("{}", effort))
        answered = await unthinking.http.post(route, json=asked)
        assert answered.status_code == 200, answered.text
        assert ("knows no reasoning" in answered.headers.get(WARNING, "")) is warns


@pytest.mark.parametrize(
    "edit",
    [
        {"type": CLEAR_THINKING, "keep": "all"},
        {"type": CLEAR_THINKING, "keep": {"type": "all"}},
        {"type": CLEAR_THINKING, "keep": {"type": "thinking_turns", "value": 99}},
        {"type": CLEAR_USES},
        {"type": CLEAR_USES, "trigger": {"type": "input_tokens", "value": 4000}},
        {"type": CLEAR_USES, "trigger": {"type": "tool_uses", "value": 5}},
        {
            "type": CLEAR_USES,
            "trigger": {"type": "tool_uses", "value": 0},
            "exclude_tools": ["look"],
        },
        {
            "type": CLEAR_USES,
            "trigger": {"type": "tool_uses", "value": 0},
            "clear_at_least": {"type": "input_tokens", "value": 4000},
        },
        {"type": "compact_20260112"},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}},
    ],
    ids=json.dumps,
)
async def test_edits_that_are_not_due_change_nothing(
    edit: dict[str, Any], running: Any, prompt_of: Any
) -> None:
    turns = {"messages": session(5), "tools": [TOOL]}
    assert await prompt_of(turns | edits(edit)) == await prompt_of(turns)
    answer = await post(running, ROUTE, body(**turns | edits(edit)))
    assert answer["context_management"] == {"applied_edits": []}


async def test_no_edits_are_told_where_none_are_asked_for(running: Any) -> None:
    for asked in (None, {}, {"edits": []}, {"edits": None}):
        answer = await post(running, ROUTE, body(context_management=asked))
        assert answer.get("context_management", {"applied_edits": []}) == {"applied_edits": []}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, [4]),
        ({"type": "thinking_turns", "value": 2}, [3, 4]),
        ({"type": "thinking_turns", "value": 0}, []),
    ],
)
async def test_old_thoughts_are_cleared(
    keep: Any, kept: list[int], running: Any, prompt_of: Any
) -> None:
    asked = {"messages": session(5)} | edits({"type": CLEAR_THINKING, "keep": keep})
    prompt = await prompt_of(asked)
    assert [n for n in range(5) if f"hm {n}." in prompt] == kept
    answer = await post(running, ROUTE, body(**asked))
    (told,) = answer["context_management"]["applied_edits"]
    assert (told["type"], told["cleared_thinking_turns"]) == (CLEAR_THINKING, 5 - len(kept))
    whole = await post(running, COUNT, {"messages": session(5), "tools": [TOOL]})
    counted = await post(running, COUNT, asked)
    assert told["cleared_input_tokens"] == whole["input_tokens"] - counted["input_tokens"] > 0
    assert counted["context_management"] == {"original_input_tokens": whole["input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "results", "arguments"),
    [
        ({}, [3, 4, 5], range(6)),
        ({"keep": {"type": "tool_uses", "value": 1}}, [5], range(6)),
        ({"keep": {"type": "tool_uses", "value": 0}}, [], range(6)),
        ({"clear_tool_inputs": True}, [3, 4, 5], [3, 4, 5]),
        ({"clear_tool_inputs": ["look"]}, [3, 4, 5], [3, 4, 5]),
        ({"clear_tool_inputs": ["other"]}, [3, 4, 5], range(6)),
        ({"clear_at_least": {"type": "input_tokens", "value": 1}}, [3, 4, 5], range(6)),
    ],
)
@pytest.mark.parametrize("trigger", [("tool_uses", 5), ("input_tokens", 10)])
async def test_old_results_are_cleared_once_that_is_due(
    trigger: tuple[str, int], fields: Any, results: Any, arguments: Any, prompt_of: Any
) -> None:
    due = {"type": trigger[0], "value": trigger[1]}
    # A result that costs more than the words in its place.
    long = [
        turn | {"content": [turn["content"][0] | {"content": f"seen {index // 2 - 1}. " * 20}]}
        if turn["role"] == "user" and index
        else turn
        for index, turn in enumerate(session(6))
    ]
    prompt = await prompt_of(
        {"messages": long} | edits({"type": CLEAR_USES, "trigger": due} | fields)
    )
    assert [n for n in range(6) if f"seen {n}." in prompt] == list(results)
    assert [n for n in range(6) if f'"p{n}"' in prompt] == list(arguments)
    assert prompt.count("was cleared") == 6 - len(results)


async def test_streams_and_whole_answers_tell_the_edits_alike(running: Any) -> None:
    asked = body(messages=session(4), **edits({"type": CLEAR_THINKING}))
    whole = await post(running, ROUTE, asked)
    streamed = await running.http.post(ROUTE, json=asked | {"stream": True})
    deltas = [line for line in streamed.text.splitlines() if '"message_delta"' in line]
    told = json.loads(deltas[-1].removeprefix("data: "))["context_management"]
    assert told == whole["context_management"]


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        ({"type": "forget_all"}, "edits[1].type"),
        ({}, "edits[1].type"),
        ({"type": CLEAR_USES, "keep": {"type": "input_tokens", "value": 1}}, "edits[1].keep.type"),
        (
            {"type": CLEAR_USES, "trigger": {"type": "tool_uses"}},
            "edits[1].trigger.value",
        ),
        (
            {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}},
            "edits[1].trigger",
        ),
    ],
)
async def test_an_edit_that_cannot_be_made_is_named(edit: Any, place: str, running: Any) -> None:
    first = {"type": CLEAR_THINKING, "keep": "all"}
    due = {"trigger": {"type": "tool_uses", "value": 0}} if edit.get("type") == CLEAR_USES else {}
    asked = body(messages=session(5), **edits(first, due | edit))
    refused = await running.http.post(ROUTE, json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"context_management.{place}"


async def test_a_summary_takes_the_place_of_what_precedes_it(prompt_of: Any) -> None:
    summary = {"type": "compaction", "content": "So far: nothing.", "encrypted_content": "x"}
    failed = {"type": "compaction", "content": None}
    turns = [
        *session(2),
        {"role": "assistant", "content": [text("Old."), summary, text("New.")]},
        USER,
        {"role": "assistant", "content": [failed, text("More.")]},
        USER,
    ]
    prompt = await prompt_of({"messages": turns})
    assert "seen" not in prompt and "Old." not in prompt
    assert prompt.index("So far: nothing.") < prompt.index("New.") < prompt.index("More.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
        ({"thread": {"type": "create"}}, "thread"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format",
        ),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    fields: Any, param: str, running: Any
) -> None:
    refused = await running.http.post(ROUTE, json=body(**fields))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_older_name_of_the_form_binds(running: Any) -> None:
    running.scheduler.output = []
    form = {"type": "json_schema", "schema": {"type": "object"}}
    await post(running, ROUTE, body(output_format=form))
    assert running.scheduler.submits[-1].sampling.grammar
