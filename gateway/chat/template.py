"""Renders conversations with the model's own chat template.

Templates are Jinja as in Hugging Face folders, with the same whitespace rules, filters and
functions, in a sandbox: they come with the model, but messages come from untrusted clients.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.chat.breaks import Breaks, mended
from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    Tool,
    ToolCall,
    object_of,
    parse_arguments,
)
from gateway.chat.tool_prompt import in_plain_words
from gateway.chat.turns import Arguments, TurnForm, forms, in_order, thinned
from gateway.errors import notices
from gateway.errors.request_errors import ErrorKind, RequestError, unsupported

TEMPLATES = Path(__file__).parent / "templates"
# Of models whose folders have none: programs make their prompts.
OWN_TEMPLATES = ("deepseek_v32",)
# Names that a request cannot set, in addition to functions and special tokens.
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
EFFORT, SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")  # variables of templates
THOUGHTS = ("<think>", "[THINK]", "<seed:think>")  # are in the templates of models that think
# Above so many characters a form is tried with short texts first, after the turns as they are.
LONG_CHARACTERS = 64 << 10
# A template is a program: it can fail in other ways than by refusing.
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError)
# Marks the end of a last turn that is to be continued. No text contains it, since these code points
# are not characters.
END_OF_LAST_TURN = "\ufdd0\ufdd1\ufdd0"


class _GenerationBlock(Extension):
    """Supports `{% generation %}`, which marks turns for training and prints nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template, and its special tokens.

    It may have a second template, for conversations with tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tools_source: str | None = None
    ) -> None:
        environment = _environment()
        self.source = source
        self.tools_source = source if tools_source is None else tools_source
        self._plain = environment.from_string(source)
        self._with_tools = environment.from_string(self.tools_source)
        self.special_tokens = dict(special_tokens)
        self._variables = _variables(environment, source)
        self._tools_variables = _variables(environment, self.tools_source)
        self._tells_in_words = not self.takes_tools
        self._breaks: Breaks | None = None
        self._own_names = OWN_NAMES | environment.globals.keys() | self.special_tokens.keys()

    @property
    def takes_tools(self) -> bool:
        """True if the template renders tools."""
        return "tools" in self._tools_variables

    def reads(self, variable: str) -> bool:
        """True if the template uses a variable, with or without tools."""
        return variable in self._variables | self._tools_variables

    @property
    def switch(self) -> str | None:
        """The variable that turns thinking on and off; None: the template has none."""
        return _switch(self._variables | self._tools_variables)

    def told_in_words(self) -> "ChatTemplate":
        """The template with tools told in plain words, although it renders some in its own."""
        told = copy.copy(self)
        told._tells_in_words = True
        return told

    def breaking(self, breaks: Breaks) -> "ChatTemplate":
        """The template for contents in which what spells a token of control is broken."""
        careful = copy.copy(self)
        careful._breaks = breaks
        return careful

    def render(self, conversation: Conversation) -> str:
        """The conversation as text that ends where the assistant's answer begins.

        Raises RequestError with the template's own message when it refuses the conversation.
        """
        messages = in_order(conversation.messages, has_developers="developer" in self.tools_source)
        tools = conversation.usable_tools
        if self._tells_in_words:
            messages = in_plain_words(messages, tools, has_system="system" in self.source)
            tools = ()
        num_characters = conversation.num_characters
        text = self._in_first_form(messages, tools, conversation.rendering, num_characters)
        if conversation.rendering.continue_final_message:
            return _cut_at_end_of_last_turn(text)
        return text

    def _in_first_form(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        rendering: Rendering,
        num_characters: int,
    ) -> str:
        """The text of the first form that the template takes without dropping instructions.

        Long turns are rendered in the forms alone in which it takes the same turns with short
        texts. Raises RequestError for what the template says of the turns as they are, if it takes
        none.
        """
        template = self._with_tools if tools else self._plain
        variables = self._tools_variables if tools else self._variables
        settings = self._settings(rendering, variables)
        settings["tools"] = [_tool(tool) for tool in tools] or None
        settings["add_generation_prompt"] = rendering.ends_with_generation_prompt
        broken = _unchanged if self._breaks is None else self._breaks.broken

        def rendered(form: TurnForm) -> str:
            turns = _turns(form, is_continued=rendering.continue_final_message)
            return template.render(
                messages=broken(turns), **self.special_tokens, **broken(settings)
            )

        is_long = num_characters > LONG_CHARACTERS
        return _first_whole(_with_thin(forms(messages), messages, is_long=is_long), rendered)

    def _settings(self, rendering: Rendering, variables: frozenset[str]) -> dict[str, Any]:
        """Template variables set by a request. Raises RequestError for unknown ones."""
        settings: dict[str, Any] = {"documents": None}
        if rendering.documents:
            if "documents" not in variables:
                raise unsupported("documents", "the model's chat template knows no documents")
            settings["documents"] = rendering.documents
        settings |= self._effort(rendering.reasoning_effort, variables)
        for name, value in rendering.kwargs.items():
            field = f"chat_template_kwargs.{name[: notices.MOST_NAME_CHARACTERS]}"
            if name in self._own_names:
                raise unsupported(field, "is no variable that a request may set")
            if name in variables:
                settings[name] = value
            else:
                notices.ignore(field, "is no variable of the model's chat template")
        return settings

    def _effort(self, effort: str | None, variables: frozenset[str]) -> dict[str, Any]:
        """Variables for the reasoning effort.

        A template without any belongs to a model that has no degrees: "none" asks nothing of one
        that does not think. Raises RequestError for one that cannot be kept from it.
        """
        if effort is None:
            return {}
        if EFFORT in variables:
            return {EFFORT: effort}
        if switch := _switch(variables):
            return {switch: effort != "none"}
        if effort != "none":
            notices.ignore(EFFORT, "the model's chat template knows no reasoning")
        elif any(thought in self.source for thought in THOUGHTS):
            raise unsupported(EFFORT, "this model thinks always")
        return {}


def _switch(variables: frozenset[str]) -> str | None:
    return next((name for name in SWITCHES if name in variables), None)


def _unchanged(value: Any) -> Any:
    return value


def _variables(environment: jinja2.Environment, source: str) -> frozenset[str]:
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _first_whole(
    found: Iterable[tuple[TurnForm, TurnForm | None]], rendered: Callable[[TurnForm], str]
) -> str:
    """The text of the first form that the template takes, best without dropping instructions.

    Raises RequestError for what it says of the first one, if it takes none.
    """
    partial: TurnForm | None = None
    refusal: Exception | None = None
    for form, thin in found:
        try:
            if thin is not None and not thin.is_whole(mended(rendered(thin))):
                partial = partial or form
                continue
            text = rendered(form)
        except FAILURES as error:
            refusal = refusal or error
            continue
        if form.is_whole(mended(text)):
            return text
        partial = partial or form
    try:
        if partial is not None:
            return rendered(partial)
    except FAILURES as error:
        refusal = refusal or error
    problem = f"messages: the model's chat template refuses them: {refusal}"
    raise RequestError(ErrorKind.INVALID, problem, field="messages") from refusal


def _with_thin(
    found: Iterator[TurnForm], messages: tuple[Message, ...], *, is_long: bool
) -> Iterator[tuple[TurnForm, TurnForm | None]]:
    """Each form, and of long turns the same form with short texts; not of the first one."""
    yield next(found), None
    if not is_long:
        yield from ((form, None) for form in found)
        return
    thin = forms(thinned(messages))
    next(thin)
    yield from zip(found, thin, strict=False)


def _turns(form: TurnForm, *, is_continued: bool) -> list[dict[str, Any]]:
    """Turns as templates read them, without keys for absent fields."""
    turns = [_turn(message, form) for message in form.messages]
    if is_continued:
        turns[-1]["content"] += END_OF_LAST_TURN
    return turns


def _turn(message: Message, form: TurnForm) -> dict[str, Any]:
    # Templates fail on a turn without content: some ask for its length, some add to it.
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, form) for call in message.tool_calls]
    return turn


def _call(call: ToolCall, form: TurnForm) -> dict[str, Any]:
    match form.arguments:
        case Arguments.WRITTEN:
            arguments: Any = parse_arguments(call.arguments)
        case Arguments.OBJECT:
            arguments = object_of(call.arguments)
        case Arguments.TEXT:
            arguments = json.dumps(object_of(call.arguments), ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _cut_at_end_of_last_turn(text: str) -> str:
    begun, *rest = text.split(END_OF_LAST_TURN)
    if len(rest) != 1:
        problem = f"the model's chat template writes the last message {len(rest)} times, not once"
        raise unsupported("continue_final_message", problem)
    return begun


def find_templates(
    config: Mapping[str, Any], file_text: str | None
) -> tuple[str | None, str | None]:
    """(template, template for tools or None) of a model folder.

    chat_template.jinja takes precedence over tokenizer_config.json, which holds a string or a list
    of named templates: "default" and perhaps "tool_use".
    """
    if file_text is not None:
        return file_text, None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default"), named.get("tool_use")
    return (template if isinstance(template, str) else None), None


def template_file(given: Path) -> Path:
    """The file of a template: one of ours by its name, or the file given."""
    return TEMPLATES / f"{given}.jinja" if str(given) in OWN_TEMPLATES else given


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and others, as tokenizer_config.json spells them."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
