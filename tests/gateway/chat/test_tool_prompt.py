"""A chat template that knows no tools is told of them in plain words."""

import json

import pytest

from gateway.chat.answer import AUTO, NONE, NoUseForParser, choose
from gateway.chat.conversation import Conversation, Message, Tool, ToolCall, ToolChoice, ToolMode
from gateway.chat.formats import HERMES
from gateway.chat.template import ChatTemplate

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
WITH_SYSTEM = ChatTemplate(TURNS + "{# system #}", {})
WITHOUT_SYSTEM = ChatTemplate(TURNS, {})
TOOL = Tool("f", "Does it", {"type": "object"})
CALL = ToolCall("call_1", "f", '{"a": 1}')
ASKED = (
    Message("user", "Hi"),
    Message("assistant", None, tool_calls=(CALL,)),
    Message("tool", "7", tool_call_id="call_1"),
)


def test_tools_calls_and_results_are_told() -> None:
    text = WITH_SYSTEM.render(Conversation(ASKED, (TOOL,)))
    line = {"name": "f", "description": "Does it", "parameters": {"type": "object"}}
    assert text.startswith("<system>") and f"\n{json.dumps(line)}\n" in text
    assert '<assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n' in text
    assert text.endswith("<user><tool_response>\n7\n</tool_response>\n")
    own = (Message("system", "Be brief."), *ASKED)
    assert WITH_SYSTEM.render(Conversation(own, (TOOL,))).startswith("<system>Be brief.\n\nYou can")
    assert WITHOUT_SYSTEM.render(Conversation(ASKED, (TOOL,))).startswith("<user>You can")


def test_without_usable_tools_nothing_is_told() -> None:
    chat = Conversation(ASKED[:1], (TOOL,), ToolChoice(ToolMode.NONE))
    assert WITH_SYSTEM.render(chat) == "<user>Hi\n"


def test_the_parser_option_turns_it_off() -> None:
    told = choose(WITH_SYSTEM, AUTO, AUTO)
    assert told.takes_tools and told.tool_calls is HERMES
    assert not choose(WITH_SYSTEM, NONE, AUTO).takes_tools
    with pytest.raises(NoUseForParser, match="kimi"):
        choose(WITH_SYSTEM, "kimi", AUTO)
