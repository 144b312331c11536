"""Reads turns and tools in OpenAI's form: dictionaries, or the objects of its library.

What asks for nothing is accepted: null, an empty list, and the annotations that servers put into
their answers. What would change the output and is not served is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagewire._chat import Message, Tool, ToolCall
from pagewire._errors import InvalidArgument

_READ = frozenset(
    ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")
)
# Of answers and caches: nothing of the next output depends on them.
_ANNOTATIONS = frozenset(
    ("annotations", "cache_control", "id", "provider_specific_fields", "reasoning_details")
)


def to_message(place: str, turn: object) -> Message:
    """A turn. Raises InvalidArgument naming the field at fault; `place` is that of the turn."""
    given = _mapping(place, turn)
    for name, value in given.items():
        if name not in _READ and name not in _ANNOTATIONS and not _is_nothing(value):
            raise InvalidArgument(f"{place}.{name}: not supported")
    calls = given.get("tool_calls") or ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise InvalidArgument(f"{place}.tool_calls: needs a list of calls")
    reasoning = given.get("reasoning_content")
    content = _content(f"{place}.content", given.get("content"))
    return Message(
        role=given.get("role", cast(Any, None)),
        content=cast(str, content),  # None is checked with the calls
        name=given.get("name"),
        reasoning=given.get("reasoning") if reasoning is None else reasoning,
        tool_calls=[_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(calls)],
        tool_call_id=given.get("tool_call_id"),
    )


def _content(place: str, content: Any) -> Any:
    """A text, or text parts joined with newlines, as the HTTP API joins them."""
    if isinstance(content, str | Mapping) or not isinstance(content, Sequence):
        return content
    texts = []
    for index, part in enumerate(content):
        given = _mapping(f"{place}[{index}]", part)
        if (kind := given.get("type", "text")) != "text":
            raise InvalidArgument(
                f"{place}[{index}].type: {kind!r} is not supported, only 'text' is"
            )
        texts.append(_text(f"{place}[{index}].text", given.get("text")))
    return "\n".join(texts)


def _call(place: str, call: object) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    given = _mapping(place, call)
    function = _function(place, given)
    return ToolCall(
        _text(f"{place}.id", given.get("id")),
        _text(f"{place}.function.name", function.get("name")),
        _text(f"{place}.function.arguments", function.get("arguments")),
    )


def to_tool(place: str, tool: object) -> Tool:
    """A function that the model may call. Raises InvalidArgument naming the field at fault."""
    function = _function(place, _mapping(place, tool))
    read = ("name", "description", "parameters", "strict")
    for name, value in function.items():
        if name not in read and not _is_nothing(value):
            raise InvalidArgument(f"{place}.function.{name}: not supported")
    return Tool(*(function.get(name) for name in read))  # type: ignore[arg-type]


def to_chosen_name(choice: Mapping[str, Any]) -> str:
    """The name of the one tool that must be called. Raises InvalidArgument."""
    return _text("tool_choice.function.name", _function("tool_choice", choice).get("name"))


def _function(place: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if (kind := given.get("type", "function")) != "function":
        raise InvalidArgument(f"{place}.type: {kind!r} is not supported, only 'function' is")
    return _mapping(f"{place}.function", given.get("function"))


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{place}: needs a string")
    return value


def _mapping(place: str, value: object) -> Mapping[str, Any]:
    """The value, or what a pydantic model holds."""
    dump = getattr(value, "model_dump", None)
    value = dump() if callable(dump) else value
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{place}: needs a mapping, not {type(value).__name__}")
    return value


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], (), {})
