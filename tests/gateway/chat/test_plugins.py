"""Formats of tool calls and reasoning that other packages bring."""

import sys
from pathlib import Path

import pytest

from gateway.chat import formats
from gateway.chat.answer import AUTO, choose
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.parts import reply_of
from gateway.chat.template import ChatTemplate
from gateway.process.config import parse_args

MODULE = '''
"""Calls as CALL name {...}."""

from gateway.chat.calls import read_arguments
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.tool_format import ToolCallFormat


def parse(source, calls):
    while (at := (yield from source.pass_until("CALL f ", calls.say))) is not None:
        source.take(at + len("CALL f "))
        calls.begin("f")
        yield from read_arguments(source, calls.add_arguments)
    calls.say(source.take(len(source.text)))


SHOUTED = ToolCallFormat("shouted", parse)
MUSED = ReasoningFormat("mused", opening="[MUSE]", closing="[DONE]")
OTHER = 5
'''
ENTRY_POINTS = """
[pagewire.tool_parsers]
shouted = shouted_calls:SHOUTED
broken = shouted_calls:MISSING
number = shouted_calls:OTHER
hermes = shouted_calls:SHOUTED

[pagewire.reasoning_parsers]
mused = shouted_calls:MUSED
"""
TEMPLATE = ChatTemplate("{{ tools }}<tool_call>", {})


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with entry points, outside of the tree."""
    (tmp_path / "shouted_calls.py").write_text(MODULE)
    info = tmp_path / "shouted_calls-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouted-calls\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shouted_calls", raising=False)


def test_a_plugin_is_loaded_once_an_option_names_it() -> None:
    assert formats.tool_parsers()[-3:] == ("broken", "number", "shouted")
    assert formats.reasoning_parsers()[-1] == "mused"
    choose(TEMPLATE, AUTO, AUTO)
    assert "shouted_calls" not in sys.modules
    chosen = choose(TEMPLATE, "shouted", "mused")
    assert chosen.described() == {"tool_call_parser": "shouted", "reasoning_parser": "mused"}
    chat = Conversation((Message("user", "Hi"),), (Tool("f"),))
    reader = chosen.reader(chat, "", None)
    assert reader is not None
    text = '[MUSE]Hm.[DONE]Look. CALL f {"a": 1}'
    parts = [part for char in text for part in reader.push(char, is_last=False)]
    reply = reply_of([*parts, *reader.push("", is_last=True)])
    assert (reply.reasoning, reply.content) == ("Hm.", "Look.")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", '{"a": 1}')]


def test_the_name_of_a_format_that_is_here_stays_its_own() -> None:
    assert formats.tool_format("hermes") is formats.HERMES


@pytest.mark.parametrize(("name", "why"), [("broken", "MISSING"), ("number", "is a int")])
def test_a_plugin_that_holds_no_format_is_refused_by_its_name(name: str, why: str) -> None:
    with pytest.raises(formats.BadPlugin, match=why):
        choose(TEMPLATE, name, AUTO)


def test_the_option_takes_a_plugins_name_and_no_other(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(model_folder), "--scheduler", "127.0.0.1:1"]
    config = parse_args([*common, "--tool-call-parser", "shouted"])
    assert config.tool_call_parser == "shouted"
    with pytest.raises(SystemExit):
        parse_args([*common, "--tool-call-parser", "whispered"])
    error = capsys.readouterr().err
    assert "--tool-call-parser: 'whispered' is none of auto, none, harmony," in error
    assert "shouted" in error
