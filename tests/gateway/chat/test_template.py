"""Conversations with tools are rendered as transformers renders them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from gateway.chat.answer import AUTO, NONE, NoUseForParser, choose
from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway.chat.formats import GLM, HERMES, LLAMA3_JSON, MISTRAL, REASONING
from gateway.chat.template import ChatTemplate
from gateway.errors.request_errors import RequestError
from gateway.tokens.tokenizer import Tokenizer, TokenizerFolderError

CALL = ToolCall("call_1", "get_weather", '{"city": "Köln", "days": [1, 2]}')
TURNS = (
    Message("user", "Weather in Köln?", name="Ada"),
    Message("assistant", None, reasoning="A tool will know.", tool_calls=(CALL,)),
    Message("tool", '{"sky": "<grey>"}', tool_call_id="call_1", name="get_weather"),
)
THEIR_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?", "name": "Ada"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "A tool will know.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": {"city": "Köln", "days": [1, 2]},
                },
            }
        ],
    },
    {
        "role": "tool",
        "content": '{"sky": "<grey>"}',
        "name": "get_weather",
        "tool_call_id": "call_1",
    },
]


@pytest.fixture
def tools(weather: dict[str, Any]) -> tuple[Tool, ...]:
    function = weather["function"]
    return (Tool(function["name"], function["description"], function["parameters"]),)


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_calls_and_results_are_written_as_transformers_writes_them(
    has_tools: bool,
    kwargs: dict[str, Any],
    tokenizer: Tokenizer,
    model_folder: Path,
    tools: tuple[Tool, ...],
    weather: dict[str, Any],
) -> None:
    given = tools if has_tools else ()
    text = tokenizer.render(Conversation(TURNS, given, rendering=Rendering(kwargs)))
    theirs = transformers.AutoTokenizer.from_pretrained(model_folder)
    assert text == theirs.apply_chat_template(
        THEIR_TURNS,
        tools=[weather] if has_tools else None,
        tokenize=False,
        add_generation_prompt=True,
        **kwargs,
    )


def test_tools_that_may_not_be_called_are_not_shown(
    tokenizer: Tokenizer, tools: tuple[Tool, ...]
) -> None:
    plain = tokenizer.render(Conversation(TURNS))
    assert tokenizer.render(Conversation(TURNS, tools)) != plain
    silent = Conversation(TURNS, tools, ToolChoice(ToolMode.NONE))
    assert tokenizer.render(silent) == plain


def test_the_last_turn_can_be_gone_on_with(tokenizer: Tokenizer) -> None:
    turns = (Message("user", "Hi"), Message("assistant", "Hello, dear "))
    rendering = Rendering(continue_final_message=True)
    text = tokenizer.render(Conversation(turns, rendering=rendering))
    assert text.endswith("<|im_start|>assistant\nHello, dear ")
    whole = tokenizer.render(Conversation(turns, rendering=Rendering(add_generation_prompt=False)))
    assert whole == text + "<|im_end|>\n"


def test_a_template_that_writes_the_last_turn_twice_cannot_go_on_with_it() -> None:
    template = ChatTemplate("{{ messages[-1].content }}{{ messages[-1].content }}", {})
    rendering = Rendering(continue_final_message=True)
    conversation = Conversation((Message("user", "Hi"),), rendering=rendering)
    with pytest.raises(RequestError, match="2 times") as refusal:
        template.render(conversation)
    assert refusal.value.field == "continue_final_message"


@pytest.mark.parametrize(
    "name", ["no_such_variable", "messages", "tools", "bos_token", "raise_exception", "namespace"]
)
def test_a_variable_that_a_request_cannot_set_is_refused_by_name(
    name: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError) as refusal:
        tokenizer.render(Conversation(TURNS, rendering=Rendering({name: True})))
    assert refusal.value.field == f"chat_template_kwargs.{name}"


def test_a_template_of_its_own_for_tools_is_used_with_tools(tools: tuple[Tool, ...]) -> None:
    template = ChatTemplate("plain", {}, "tools: {{ tools[0].function.name }}")
    assert template.takes_tools
    assert template.render(Conversation(TURNS)) == "plain"
    assert template.render(Conversation(TURNS, tools)) == "tools: get_weather"


HERMES_LIKE = '{{ tools }}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
ESCAPED = r"""{{ tools }}{{ "<tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call>" }}"""
LLAMA_LIKE = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}"
    '{"name": function name, "parameters": dictionary}{% endif %}<|eot_id|>'
)


@pytest.mark.parametrize(
    ("source", "tool_calls", "reasoning"),
    [
        (HERMES_LIKE, HERMES, None),
        (ESCAPED, HERMES, None),
        (HERMES_LIKE + "<think>", HERMES, REASONING["qwen3"]),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL, None),
        (LLAMA_LIKE, LLAMA3_JSON, None),
        ("{{ tools }}<tool_call><function=name></tool_call>", HERMES, None),  # told, too
        ("{{ tools }}<tool_call>name<arg_key>key</arg_key></tool_call>", GLM, None),
        ("<tool_call> without tools", HERMES, None),  # told in plain words
    ],
)
def test_the_formats_are_those_that_the_template_teaches(
    source: str, tool_calls: object, reasoning: object
) -> None:
    chosen = choose(ChatTemplate(source, {}), AUTO, AUTO)
    assert (chosen.tool_calls, chosen.reasoning) == (tool_calls, reasoning)
    assert choose(ChatTemplate(source, {}), NONE, NONE).tool_calls is None


@pytest.mark.parametrize(
    "form",
    ["<|action_start|><|plugin|>", "<|tool|></|tool|>", "<function=name></function>", "```python"],
)
def test_tools_are_told_in_words_where_no_parser_reads_the_calls(form: str) -> None:
    template = ChatTemplate("{{ tools }}" + form, {})
    chosen = choose(template, AUTO, AUTO)
    assert chosen.takes_tools and chosen.tells_in_words and chosen.tool_calls is HERMES
    named = choose(template, "kimi", AUTO)
    assert not named.tells_in_words and named.tool_calls is not None
    assert choose(template, NONE, AUTO).tool_calls is None


def test_a_parser_without_a_use_is_refused() -> None:
    with pytest.raises(NoUseForParser, match="--tool-call-parser mistral"):
        choose(ChatTemplate("{{ messages }}", {}), "mistral", AUTO)
    with pytest.raises(NoUseForParser, match="--tool-call-parser hermes"):
        choose(None, "hermes", AUTO)
    assert choose(ChatTemplate("{{ tools }}", {}), "mistral", "deepseek_r1").tool_calls is MISTRAL


def test_a_folder_with_a_template_for_tools_gives_it_to_them(
    model_folder: Path, tmp_path: Path, tools: tuple[Tool, ...]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink()
    named = (
        '{"chat_template": [{"name": "default", "template": "plain"},'
        ' {"name": "tool_use", "template": "{{ tools | length }} tools"}]}'
    )
    (folder / "tokenizer_config.json").write_text(named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render(Conversation(TURNS)) == "plain"
    assert tokenizer.render(Conversation(TURNS, tools)) == "1 tools"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    conversation = Conversation((Message("developer", "x"),))
    assert ChatTemplate("{{ messages[0].role }}", {}).render(conversation) == "system"
    knowing = ChatTemplate("{{ messages[0].role }}{# developer #}", {})
    assert knowing.render(conversation) == "developer"


@pytest.mark.parametrize(
    ("source", "effort", "text"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking is defined }}", None, "False"),
    ],
)
def test_the_effort_reaches_templates_that_know_degrees_or_a_switch(
    source: str, effort: str | None, text: str
) -> None:
    rendering = Rendering(reasoning_effort=effort)
    assert ChatTemplate(source, {}).render(Conversation(TURNS, rendering=rendering)) == text


def test_no_effort_asks_nothing_of_a_model_that_does_not_think() -> None:
    asked = Conversation(TURNS, rendering=Rendering(reasoning_effort="none"))
    assert ChatTemplate("plain", {}).render(asked) == "plain"
    with pytest.raises(RequestError, match="reasoning_effort: this model thinks always"):
        ChatTemplate("{{ messages }}<think>", {}).render(asked)


@pytest.mark.parametrize("field", ["reasoning_effort", "documents"])
def test_what_the_template_has_no_use_for_is_refused_by_name(field: str) -> None:
    rendering = Rendering(**{field: "low" if field == "reasoning_effort" else ({"text": "x"},)})
    with pytest.raises(RequestError) as refusal:
        ChatTemplate("{{ messages }}", {}).render(Conversation(TURNS, rendering=rendering))
    assert refusal.value.field == field


def test_documents_reach_templates_that_know_them() -> None:
    rendering = Rendering(documents=({"text": "x"},))
    template = ChatTemplate("{{ documents[0].text }}", {})
    assert template.render(Conversation(TURNS, rendering=rendering)) == "x"


def test_a_template_of_a_file_replaces_the_models(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(model_folder, file)
    assert tokenizer.render(Conversation(TURNS)) == f"<|im_start|>{TURNS[0].content}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"--chat-template: .*mine.jinja: No such file"),
        (b"{% if %}", r"--chat-template: .*mine.jinja is no Jinja template: line 1: "),
        (b"\xff\xfe", r"--chat-template: .*mine.jinja is not UTF-8 text"),
    ],
)
def test_a_template_file_that_cannot_be_read_is_named(
    content: bytes | None, problem: str, model_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TokenizerFolderError, match=problem):
        Tokenizer.from_folder(model_folder, file)


def test_a_template_of_the_model_that_is_none_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x\\n{% for %}"}')
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(TokenizerFolderError, match=r"the chat template in .* line 2: "):
        Tokenizer.from_folder(folder)
