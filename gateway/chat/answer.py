"""Parses a model's answer into reasoning, content and tool calls, as the text arrives.

The formats of the served model are chosen once, at the start, from its chat template or the command
line.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.chat import forced, formats
from gateway.chat.calls import Calls
from gateway.chat.conversation import Conversation
from gateway.chat.families import harmony
from gateway.chat.families.hermes import HERMES
from gateway.chat.parts import Content, Part, Reasoning
from gateway.chat.reasoning import (
    CallOpening,
    OrphanClose,
    ReasoningTokens,
    reasoning_parser,
    stretches,
)
from gateway.chat.reasoning_format import CLOSE, OPEN, ReasoningFormat
from gateway.chat.source import Parser, Source, Steps
from gateway.chat.template import ChatTemplate
from gateway.chat.tool_format import ToolCallFormat, long_id
from gateway.errors import notices
from gateway.errors.request_errors import unsupported
from gateway.structure.calls import AnyStructure, CallsInAnswer, CallWriting
from gateway.structure.tags import Asked, StructuralTags
from gateway.structure.thinking import BUDGET, Thought, ThoughtFirst
from gateway.text.stretches import Stretch

AUTO, NONE = "auto", "none"


class NoUseForParser(ValueError):
    """Raised when an option names a parser that the served model cannot need."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of the served model; None: it has none."""

    takes_tools: bool = False  # by its chat template, or in plain words
    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)  # of the markers that are tokens
    text_ids: tuple[int, ...] = ()  # of tokens in free text that no text spells, such as <think>
    tells_in_words: bool = False  # tools are told in plain words

    def described(self) -> dict[str, str | None]:
        """The names of both formats, as their options call them."""
        return {
            "tool_call_parser": None if self.tool_calls is None else self.tool_calls.name,
            "reasoning_parser": None if self.reasoning is None else self.reasoning.name,
        }

    def check(self, conversation: Conversation) -> None:
        """Raises RequestError when the model cannot use the tools, or its calls not be parsed."""
        if not conversation.usable_tools:
            return
        if not self.takes_tools:
            raise unsupported("tools", "the model's chat template knows no tools")
        if self.tool_calls is None and not forced.is_forced(conversation):
            problem = "no --tool-call-parser is known for the model's chat template"
            raise unsupported("tools", problem)

    def structure(self, conversation: Conversation, asked: Asked | None) -> AnyStructure | None:
        """The structure of the answer, required by the tools or by the request.

        Tools that are strict, or go with a form, hold each call to its schema from its opening on.
        Raises RequestError where the calls cannot be told from the form.
        """
        usable = conversation.usable_tools
        if not usable:
            return self._in_channels(conversation, asked)
        if forced.is_forced(conversation):  # no answer has both: the call comes first
            return forced.structure(conversation)
        if isinstance(asked, StructuralTags):  # they say themselves how calls are written
            return asked
        if asked is None and not any(tool.is_strict for tool in usable):
            return None
        if asked is not None and self._goes_on_in_channel(conversation):
            return asked
        writing = None if self.tool_calls is None else self.tool_calls.writing
        if writing is None or not self._tells_apart(writing, asked):
            name = "tools" if asked is None else asked.place.partition(".")[0]
            raise unsupported(name, "cannot be told from a call in this model's format")
        return CallsInAnswer(
            "tools",
            tuple(forced.schemas_of(conversation, binds_all=asked is not None).items()),
            writing,
            conversation.parallel_tool_calls,
            self.token_ids,
            self.text_ids,
            asked,
        )

    def _in_channels(self, conversation: Conversation, asked: Asked | None) -> AnyStructure | None:
        """A form in a channel of its own, with the reasoning before it, where the model has any."""
        if asked is None or isinstance(asked, StructuralTags):
            return asked
        has_channels = self._thinks_in_channels and all(
            marker in self.token_ids for marker in harmony.TOKENS
        )
        if not has_channels or self._goes_on_in_channel(conversation):
            return asked
        writing = harmony.HARMONY.writing
        assert writing is not None
        return CallsInAnswer(asked.place, (), writing, False, self.token_ids, (), asked)

    def _goes_on_in_channel(self, conversation: Conversation) -> bool:
        """True if the answer continues the text of a channel."""
        return self._thinks_in_channels and conversation.rendering.continue_final_message

    @property
    def _thinks_in_channels(self) -> bool:
        return self.reasoning is not None and self.reasoning.is_in_channels

    def _tells_apart(self, writing: CallWriting, asked: Asked | None) -> bool:
        """True if it is plain where a call begins: a bare brace may also begin a form."""
        return not writing.begins_bare or asked is None or writing.opening in self.token_ids

    def shown_tokens(self, conversation: Conversation) -> tuple[str, ...]:
        """Special tokens that the parser of the answer must see."""
        tool_format = self._format_for(conversation)
        if tool_format is None and self._thinks_in_channels:
            return harmony.TOKENS
        calls = () if tool_format is None else tool_format.shown_tokens
        if self.reasoning is None or self.reasoning.is_in_channels:
            return calls
        return (self.reasoning.opening, self.reasoning.closing, *calls)

    def with_markers(self, tags: StructuralTags) -> StructuralTags:
        """Tags whose markers may come as the model's tokens."""
        return replace(tags, token_ids=self.token_ids, text_ids=self.text_ids)

    def with_thought(
        self, conversation: Conversation, prompt: str, answer: AnyStructure | None
    ) -> AnyStructure | ThoughtFirst | None:
        """The structure of the answer with the reasoning that may precede it.

        Raises RequestError for a budget of reasoning that cannot be held.
        """
        budget = conversation.max_reasoning_tokens
        if budget is not None and self.reasoning is None:
            notices.ignore(BUDGET, "has no effect: no --reasoning-parser is known for the model")
        if self._thinks_in_channels:
            if budget is not None:
                raise unsupported(BUDGET, "is not supported for reasoning in channels")
            return answer
        form = self.reasoning
        if form is None or _is_over(form, conversation, prompt):
            return answer
        is_held = answer is not None and not _leaves_text_free(answer)
        if budget is None and not is_held:
            return answer
        thought = Thought(form.opening, form.closing, _is_open(form, prompt), budget, form.label)
        return ThoughtFirst(thought, answer, self.token_ids, self.text_ids)

    def reader(
        self, conversation: Conversation, prompt: str, structure: AnyStructure | ThoughtFirst | None
    ) -> "AnswerReader | None":
        """The parser of one answer; None when all is content."""
        calls = self._call_parser(conversation, structure)
        shows = conversation.include_reasoning
        form = self.reasoning
        if form is None or not self._may_think(structure):
            return None if calls is None else AnswerReader(None, calls, shows)
        is_open = not form.is_in_channels and _is_open(form, prompt)
        thought = ReasoningTokens(is_open=is_open, opening=form.head, closing=form.closing)
        if form.is_in_channels:
            messages = calls or _messages_parser(ends_in_form=_is_call_or_form(structure))
            return AnswerReader(None, messages, shows, thought)
        parse = partial(
            reasoning_parser,
            form,
            is_open=is_open,
            opening=self._call_opening(conversation, structure),
        )
        orphan = OrphanClose(form.closing)
        return AnswerReader(lambda on_call: parse(on_call=on_call), calls, shows, thought, orphan)

    def stretches(
        self, conversation: Conversation, prompt: str, structure: AnyStructure | ThoughtFirst | None
    ) -> Parser[Stretch] | None:
        """Tells an answer's reasoning and the rest apart; None when it has no reasoning."""
        form = self.reasoning
        if form is None or not self._may_think(structure):
            return None
        if not form.is_in_channels:
            opening = self._call_opening(conversation, structure)
            return stretches(form, is_open=_is_open(form, prompt), opening=opening)
        names = frozenset(tool.name for tool in conversation.usable_tools)
        ends_in_form = _is_call_or_form(structure)

        def parse(source: Source, events: list[Stretch]) -> Steps[None]:
            listener = harmony.StretchesOfMessages(events, names, ends_in_form=ends_in_form)
            return harmony.parse_harmony(source, listener)

        return Parser(parse)

    def _call_opening(
        self, conversation: Conversation, structure: AnyStructure | ThoughtFirst | None
    ) -> CallOpening | None:
        """The calls that end the reasoning; None where a grammar lets only its marker end it."""
        tool_format = self._format_for(conversation)
        is_call = None if tool_format is None else tool_format.is_call
        if tool_format is None or is_call is None or isinstance(structure, ThoughtFirst):
            return None
        names = frozenset(tool.name for tool in conversation.usable_tools)
        openings = tool_format.openings[: 1 if structure is not None else None]  # held: tags alone

        def begins(source: Source, at: int, marker: str) -> Steps[bool]:
            return is_call(source, at, marker, names)

        return CallOpening(openings, begins)

    def _may_think(self, structure: AnyStructure | ThoughtFirst | None) -> bool:
        """True if the answer may have reasoning."""
        if self.reasoning is None:
            return False
        if structure is None or _leaves_text_free(structure):
            return True
        return self._thinks_in_channels and _is_call_or_form(structure)

    def _format_for(self, conversation: Conversation) -> ToolCallFormat | None:
        if forced.is_forced(conversation):
            new_id = long_id if self.tool_calls is None else self.tool_calls.new_id
            return forced.tool_format(conversation, new_id)
        return self.tool_calls if conversation.usable_tools else None

    def _call_parser(
        self, conversation: Conversation, structure: AnyStructure | ThoughtFirst | None
    ) -> Parser[Part] | None:
        tool_format = self._format_for(conversation)
        if tool_format is None:
            return None
        schemas = {tool.name: tool.parameters or {} for tool in conversation.usable_tools}
        names, max_calls = frozenset(schemas), None if conversation.parallel_tool_calls else 1
        ends_in_form = _is_call_or_form(structure)
        answer = structure.answer if isinstance(structure, ThoughtFirst) else structure
        is_held = isinstance(answer, CallsInAnswer)

        def parse(source: Source, events: list[Part]) -> Steps[None]:
            calls = Calls(
                names, events, tool_format.new_id, max_calls, schemas, ends_in_form, is_held
            )
            return tool_format.parse(source, calls)

        return Parser(parse)


def _messages_parser(*, ends_in_form: bool) -> Parser[Part]:
    """The parser of messages in channels, without tools."""

    def parse(source: Source, events: list[Part]) -> Steps[None]:
        calls = Calls(frozenset(), events, long_id, ends_in_form=ends_in_form)
        return harmony.parse_harmony(source, calls)

    return Parser(parse)


def _is_open(form: ReasoningFormat, prompt: str) -> bool:
    """True if an answer to the prompt begins inside reasoning."""
    is_always = form.begins_inside and not form.is_closed_at_end(prompt)
    return is_always or form.is_open_at_end(prompt)


def _is_over(form: ReasoningFormat, conversation: Conversation, prompt: str) -> bool:
    """True if the answer has no reasoning, since the prompt has ended it or goes on after it."""
    goes_on = conversation.rendering.continue_final_message and not form.is_open_at_end(prompt)
    return goes_on or form.is_closed_at_end(prompt)


def _is_call_or_form(structure: AnyStructure | ThoughtFirst | None) -> bool:
    return isinstance(structure, CallsInAnswer) and structure.form is not None


def _leaves_text_free(structure: AnyStructure | ThoughtFirst) -> bool:
    """True if reasoning may come wherever the model writes it."""
    if isinstance(structure, ThoughtFirst):
        return True
    if not isinstance(structure, CallsInAnswer) or structure.form is not None:
        return False
    return not structure.writing.begins_bare


class AnswerReader:
    """Parses one answer."""

    def __init__(
        self,
        reasoning: Callable[[Callable[[int], None]], Parser[Part]] | None,
        calls: Parser[Part] | None,
        shows_reasoning: bool,
        thought: ReasoningTokens | None = None,
        orphan: OrphanClose | None = None,
    ) -> None:
        self.thought = thought  # counts the tokens of the reasoning; None: there is none
        self._reasoning = None if reasoning is None else reasoning(self.end_reasoning)
        self._calls = calls
        self._shows_reasoning = shows_reasoning
        self._orphan = orphan
        self._drops_orphan = False  # once a call has ended the reasoning

    def end_reasoning(self, num_characters: int) -> None:
        """Ends the reasoning at a call, of which so many characters have come."""
        self._drops_orphan = True
        if self.thought is not None:
            self.thought.end_at_call(num_characters)

    def push(self, text: str, *, is_last: bool, is_complete: bool = False) -> tuple[Part, ...]:
        """The parts that new text adds to the answer.

        `is_complete` says of the last text that the model has ended it, and no limit.
        """
        if self._reasoning is None:
            return self._read_content(text, is_last, is_complete)
        parts: list[Part] = []
        content = ""
        for thought in self._reasoning.push(text, is_last=is_last):
            if isinstance(thought, Content):
                content += thought.text
            elif self._shows_reasoning:
                parts.append(thought)
        return (*parts, *self._read_content(content, is_last, is_complete))

    def _read_content(self, text: str, is_last: bool, is_complete: bool) -> tuple[Part, ...]:
        if self._calls is None:
            return (Content(text),) if text else ()
        parts = self._calls.push(text, is_last=is_last, is_complete=is_complete)
        if self._orphan is not None and self._drops_orphan:
            parts = list(_without_orphan(self._orphan, parts, is_last=is_last))
        if self._shows_reasoning:
            return tuple(parts)
        return tuple(part for part in parts if not isinstance(part, Reasoning))


def _without_orphan(orphan: OrphanClose, parts: list[Part], *, is_last: bool) -> Iterator[Part]:
    for part in parts:
        text = orphan.push(part.text) if isinstance(part, Content) else orphan.flush()
        if text:
            yield Content(text)
        if not isinstance(part, Content):
            yield part
    if is_last and (rest := orphan.flush()):
        yield Content(rest)


def choose(
    template: ChatTemplate | None,
    tool_call_parser: str,
    reasoning_parser: str,
    markers: Mapping[str, int] | None = None,
    text_ids: Collection[int] = (),
) -> ChatFormat:
    """The formats for a model's chat template and the command line's options.

    `markers` are the ids of tokens that are added to the vocabulary, `text_ids` those of them that
    are text as any other.

    Raises NoUseForParser for a tool call parser that the template's calls cannot need, BadPlugin,
    or LookupError for a name that no format has.
    """
    source = "" if template is None else template.tools_source
    is_auto, tool_calls = tool_call_parser == AUTO, None
    if tool_call_parser not in (AUTO, NONE):
        tool_calls = formats.tool_format(tool_call_parser)
    known_form = formats.detect(source) if is_auto else tool_calls
    knows_tools = template is not None and template.takes_tools
    # A template may know tools in a form of calls that no parser reads.
    is_told = template is not None and (not knows_tools or (is_auto and known_form is None))
    takes_tools = knows_tools or (is_told and tool_call_parser != NONE)
    if tool_calls is not None and not takes_tools:
        raise NoUseForParser(
            f"--tool-call-parser {tool_call_parser}: the model has no chat template"
        )
    if is_told and tool_calls not in (None, HERMES):
        problem = "the model's chat template knows no tools; they are told in the form of hermes"
        raise NoUseForParser(f"--tool-call-parser {tool_call_parser}: {problem}")
    if is_auto and takes_tools:
        tool_calls = HERMES if is_told else known_form
    reasoning = None
    if reasoning_parser == AUTO:
        reasoning = formats.detect_reasoning(source)
    elif reasoning_parser != NONE:
        reasoning = formats.reasoning_format(reasoning_parser)
    known = markers or {}
    own = () if reasoning is None else (reasoning.opening, reasoning.closing)
    thoughts = [known[text] for text in dict.fromkeys((OPEN, CLOSE, *own)) if text in known]
    ids = (*thoughts, *text_ids)
    return ChatFormat(takes_tools, tool_calls, reasoning, known, ids, is_told and takes_tools)
