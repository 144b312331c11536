"""Required tool calls: the answer is constrained to plain JSON, whatever the model's own format.

The answer of one required function is its arguments alone; of several it is a list of calls.
"""

from collections.abc import Callable
from functools import partial

from gateway.chat.calls import Calls, read_list
from gateway.chat.conversation import Conversation, Tool, ToolMode
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.errors import limits
from gateway.structure.structure import ANY_OBJECT, CallList, JsonSchema

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def is_forced(conversation: Conversation) -> bool:
    """True if the answer must be a call."""
    return bool(conversation.tools) and conversation.tool_choice.mode is ToolMode.REQUIRED


def schemas_of(conversation: Conversation, *, binds_all: bool) -> dict[str, JsonSchema]:
    """The schemas of the usable tools by name; unless all are bound, of loose tools any object.

    A loose tool's schema is held as far as it can be.
    """
    usable = conversation.usable_tools
    return {
        tool.name: _schema(index, tool, is_bound=binds_all or tool.is_strict)
        for index, tool in enumerate(conversation.tools)
        if tool in usable
    }


def structure(conversation: Conversation) -> JsonSchema | CallList:
    """The constraint on an answer that must be a call."""
    schemas = schemas_of(conversation, binds_all=True)
    if conversation.tool_choice.name is not None:
        return schemas[conversation.tool_choice.name]
    max_calls = limits.MAX_TOOL_CALLS if conversation.parallel_tool_calls else 1
    return CallList("tools", tuple(schemas.items()), max_calls)


def _schema(index: int, tool: Tool, *, is_bound: bool) -> JsonSchema:
    place = tool.places_at(index).parameters
    if not is_bound:
        return JsonSchema(place, ANY_OBJECT)
    schema = NO_ARGUMENTS if tool.parameters is None else tool.parameters
    return JsonSchema(place, schema, is_loose=not tool.is_strict)


def tool_format(conversation: Conversation, new_id: Callable[[], str]) -> ToolCallFormat:
    """The format for parsing the answer."""
    name = conversation.tool_choice.name
    parse = _parse_list if name is None else partial(_parse_arguments, name=name)
    return ToolCallFormat("forced", parse, new_id=new_id)


def _parse_list(source: Source, calls: Calls) -> Steps[None]:
    start = yield from source.skip_space(0)
    yield from read_list(source, start, calls)
    while (yield from source.more()):
        pass
    calls.say(source.take(len(source.text)))


def _parse_arguments(source: Source, calls: Calls, *, name: str) -> Steps[None]:
    if (yield from source.skip_space(0)) == len(source.text):
        return  # it ended before the call, within the reasoning perhaps
    calls.begin(name)
    while True:
        calls.add_arguments(source.take(len(source.text)))
        if not (yield from source.more()):
            return
