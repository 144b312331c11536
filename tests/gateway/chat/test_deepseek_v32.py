"""Prompts of DeepSeek V3.2 by the template that is here, since its folder has none."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from gateway.chat.answer import AUTO, choose
from gateway.chat.conversation import Conversation, Message, Rendering, Tool, ToolCall
from gateway.chat.families.deepseek import BAR
from gateway.chat.template import OWN_TEMPLATES, ChatTemplate, template_file
from gateway.errors.request_errors import RequestError
from gateway.tokens.tokenizer import Tokenizer
from pagewire.cli.launcher.options.up_options import add_options, passed_words
from tests.gateway.chat.call_texts import DSML, dsml

BEGIN, END = f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
SYSTEM = Message("system", "You are a helpful assistant.")
THINKING, PLAIN = {"thinking": True}, {"thinking": False}
WEATHER = Tool("get_weather", description="Ü", parameters={"type": "object", "properties": {}})


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(template_file(Path("deepseek_v32")).read_text("utf-8"), {})


def prompt(
    template: ChatTemplate,
    *messages: Message,
    variables: dict[str, Any] = PLAIN,
    tools: tuple[Tool, ...] = (),
    **options: Any,
) -> str:
    rendering = Rendering(kwargs=variables, **options)
    return template.render(Conversation(messages, tools=tools, rendering=rendering))


def called(*calls: tuple[str, str], reasoning: str | None = None, content: str = "") -> Message:
    made = tuple(ToolCall(f"call_{name}", name, arguments) for name, arguments in calls)
    return Message("assistant", content, reasoning=reasoning, tool_calls=made)


def result(name: str, content: str) -> Message:
    return Message("tool", content, tool_call_id=f"call_{name}")


def test_thoughts_before_the_last_question_are_left_out(template: ChatTemplate) -> None:
    messages = (
        SYSTEM,
        Message("user", "hello"),
        Message("assistant", "Hello! I am DeepSeek.", reasoning="thinking..."),
        Message("user", "1+1=?"),
    )
    begun = (
        f"{BEGIN}You are a helpful assistant.{USER}hello{ASSISTANT}</think>"
        f"Hello! I am DeepSeek.{END}{USER}1+1=?{ASSISTANT}"
    )
    assert prompt(template, *messages, variables=THINKING) == f"{begun}<think>"
    assert prompt(template, *messages, variables={"enable_thinking": True}) == f"{begun}<think>"
    assert prompt(template, *messages) == f"{begun}</think>"
    assert prompt(template, *messages, variables={}) == f"{begun}</think>"


@pytest.mark.parametrize(("effort", "ending"), [("high", "<think>"), ("none", "</think>")])
def test_the_effort_turns_thinking_on_and_off(
    template: ChatTemplate, effort: str, ending: str
) -> None:
    text = prompt(template, Message("user", "x"), variables={}, reasoning_effort=effort)
    assert text == f"{BEGIN}{USER}x{ASSISTANT}{ending}"


def test_calls_and_results_after_the_last_question_keep_their_thoughts(
    template: ChatTemplate,
) -> None:
    turns = (
        Message("user", "weather?"),
        called(
            ("get_weather", '{"city": "Zürich", "days": [1, 2], "now": true}'),
            ("rest", "{}"),
            reasoning="look",
            content="Let me see.",
        ),
        result("get_weather", "sunny"),
        result("rest", ""),
    )
    block = (
        f"\n\n<{DSML}function_calls>\n"
        f'<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">Zürich</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">[1, 2]</{DSML}parameter>\n'
        f'<{DSML}parameter name="now" string="false">true</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="rest">\n\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>{END}"
    )
    results = (
        "\n\n<function_results>\n<result>sunny</result>\n<result></result>\n</function_results>\n\n"
    )
    begun = f"{BEGIN}{USER}weather?{ASSISTANT}"
    assert prompt(template, *turns, variables=THINKING) == (
        f"{begun}<think>look</think>Let me see.{block}{results}<think>"
    )
    assert prompt(template, *turns) == f"{begun}</think>Let me see.{block}{results}</think>"
    again = (*turns, Message("assistant", "Sunny.", reasoning="so"), Message("user", "thanks"))
    assert prompt(template, *again, variables=THINKING) == (
        f"{begun}</think>Let me see.{block}{results}</think>Sunny.{END}"
        f"{USER}thanks{ASSISTANT}<think>"
    )


def test_tools_are_told_after_the_instructions_or_before_all_else(template: ChatTemplate) -> None:
    ask = Message("user", "weather?")
    told = prompt(template, SYSTEM, ask, tools=(WEATHER,))
    head, tail = f"{BEGIN}{SYSTEM.content}\n\n## Tools\nYou have access to", f"{USER}weather?"
    assert told.startswith(head)
    schema = '{"name": "get_weather", "description": "Ü", "parameters": {"type": "object", '
    listed = f'<functions>\n{schema}"properties": {{}}}}}}\n</functions>\n{tail}'
    assert listed in told
    assert f'writing a "<{DSML}function_calls>" block' in told
    alone = prompt(template, ask, tools=(WEATHER,))
    assert alone == told.replace(str(SYSTEM.content), "")


def test_a_calls_own_text_is_what_the_parser_of_calls_reads(template: ChatTemplate) -> None:
    chosen = choose(template, AUTO, AUTO)
    assert chosen.tool_calls is not None and chosen.reasoning is not None
    assert (chosen.tool_calls.name, chosen.reasoning.name) == ("deepseek_v32", "qwen3")
    assert not chosen.tells_in_words
    turns = (Message("user", "x"), called(("f", '{"a": "1"}')), result("f", "2"))
    assert dsml("function_calls", ("f", {"a": ("true", "1")})) in prompt(template, *turns)


@pytest.mark.parametrize(
    ("messages", "variables", "named"),
    [
        ([Message("user", "x"), result("f", "y")], PLAIN, "must follow a call"),
        (
            [Message("user", "x"), called(("f", "{}")), result("f", "y"), result("g", "z")],
            PLAIN,
            "must follow a call",
        ),
        ([Message("user", "x"), Message("assistant", "y")], THINKING, "needs its reasoning"),
    ],
)
def test_turns_that_the_models_program_refuses(
    template: ChatTemplate, messages: list[Message], variables: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        prompt(template, *messages, variables=variables)


def test_a_last_answer_is_continued_where_it_ends(template: ChatTemplate) -> None:
    turns = (Message("user", "x"), Message("assistant", "It is"))
    text = prompt(template, *turns, continue_final_message=True, add_generation_prompt=False)
    assert text == f"{BEGIN}{USER}x{ASSISTANT}</think>It is"


def test_the_option_takes_the_name_in_place_of_a_file(
    model_folder: Path, template: ChatTemplate
) -> None:
    tokenizer = Tokenizer.from_folder(model_folder, Path("deepseek_v32"))
    conversation = Conversation((Message("user", "x"),))
    assert tokenizer.render(conversation) == template.render(conversation)
    parser = argparse.ArgumentParser()
    add_options(parser)
    for name in OWN_TEMPLATES:
        words = passed_words(parser.parse_args(["--chat-template", name]), "gateway")
        assert words == ("--chat-template", name)
