"""Reads a model's answer: reasoning first, then content and tool calls, as the text arrives.

Which formats the served model speaks is decided once, at the start, from its chat template or by
the command line.
"""

from dataclasses import dataclass
from enum import Enum

from gateway.chat import formats
from gateway.chat.calls import Calls
from gateway.chat.conversation import Conversation, ToolMode
from gateway.chat.formats import ToolCallFormat
from gateway.chat.parts import Content, Part
from gateway.chat.reasoning import OPEN, is_open_at_end, reasoning_parser
from gateway.chat.source import Parser, Source, Steps
from gateway.chat.template import ChatTemplate
from gateway.errors import unsupported

AUTO, NONE = "auto", "none"


class NoUseForParser(ValueError):
    """The command line asks for a parser that the served model cannot need."""


class ReasoningFormat(Enum):
    """When an answer begins with reasoning."""

    QWEN3 = "qwen3"  # when the answer, or the prompt's last word, opens it
    DEEPSEEK_R1 = "deepseek_r1"  # always, whether it is opened or not


TOOL_CALL_PARSERS = (AUTO, NONE, *formats.FORMATS)
REASONING_PARSERS = (AUTO, NONE, *(form.value for form in ReasoningFormat))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the served model writes what is more than text; None where it does not."""

    takes_tools: bool = False  # its chat template does
    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    def check(self, conversation: Conversation) -> None:
        """Raises RequestError when the model cannot be told of the tools, or not be understood."""
        if not conversation.usable_tools:
            return
        if not self.takes_tools:
            raise unsupported("tools", "the model's chat template knows no tools")
        if conversation.tool_choice.mode is ToolMode.REQUIRED:
            raise unsupported("tool_choice", "this server cannot force a call; send 'auto'")
        if self.tool_calls is None:
            problem = "no --tool-call-parser is known for the model's chat template"
            raise unsupported("tools", problem)

    def shown_tokens(self, conversation: Conversation) -> tuple[str, ...]:
        """Special tokens that the reader of the answer must see."""
        if not conversation.usable_tools or self.tool_calls is None:
            return ()
        return self.tool_calls.shown_tokens

    def reader(self, conversation: Conversation, prompt: str) -> "AnswerReader | None":
        """For one answer; None when all of it is content."""
        reasoning, calls = self._reasoning_parser(prompt), self._call_parser(conversation)
        if reasoning is None and calls is None:
            return None
        return AnswerReader(reasoning, calls, conversation.include_reasoning)

    def _reasoning_parser(self, prompt: str) -> Parser | None:
        if self.reasoning is None:
            return None
        is_open = self.reasoning is ReasoningFormat.DEEPSEEK_R1 or is_open_at_end(prompt)
        return reasoning_parser(is_open=is_open)

    def _call_parser(self, conversation: Conversation) -> Parser | None:
        tools = conversation.usable_tools
        if not tools or self.tool_calls is None:
            return None
        names = frozenset(tool.name for tool in tools)
        max_calls = None if conversation.parallel_tool_calls else 1
        tool_format = self.tool_calls

        def parse(source: Source, events: list[Part]) -> Steps[None]:
            return tool_format.parse(source, Calls(names, events, tool_format.new_id, max_calls))

        return Parser(parse)


class AnswerReader:
    """One answer."""

    def __init__(
        self, reasoning: Parser | None, calls: Parser | None, shows_reasoning: bool
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._shows_reasoning = shows_reasoning

    def push(self, text: str, *, is_last: bool) -> tuple[Part, ...]:
        """What new text adds to the answer."""
        if self._reasoning is None:
            return self._read_content(text, is_last)
        parts: list[Part] = []
        content = ""
        for thought in self._reasoning.push(text, is_last=is_last):
            if isinstance(thought, Content):
                content += thought.text
            elif self._shows_reasoning:
                parts.append(thought)
        return (*parts, *self._read_content(content, is_last))

    def _read_content(self, text: str, is_last: bool) -> tuple[Part, ...]:
        if self._calls is None:
            return (Content(text),) if text else ()
        return tuple(self._calls.push(text, is_last=is_last))


def choose(
    template: ChatTemplate | None, tool_call_parser: str, reasoning_parser: str
) -> ChatFormat:
    """The formats that a model's chat template and the command line ask for.

    Raises NoUseForParser for a tool call parser that the template gives nothing to do.
    """
    takes_tools = template is not None and template.takes_tools
    source = "" if template is None else template.tools_source
    tool_calls = formats.FORMATS.get(tool_call_parser)
    if tool_calls is not None and not takes_tools:
        problem = "the model's chat template knows no tools"
        raise NoUseForParser(f"--tool-call-parser {tool_call_parser}: {problem}")
    if tool_call_parser == AUTO and takes_tools:
        tool_calls = formats.detect(source)
    reasoning = None
    if reasoning_parser == AUTO:
        reasoning = ReasoningFormat.QWEN3 if OPEN in source else None
    elif reasoning_parser != NONE:
        reasoning = ReasoningFormat(reasoning_parser)
    return ChatFormat(takes_tools, tool_calls, reasoning)
