"""Turns of the Messages API: blocks of content, and their conversion to turns of a chat."""

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from gateway.chat.conversation import INVALID_JSON, Message, ToolCall
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.http import fields
from gateway.http.anthropic import other_blocks
from gateway.http.anthropic.tool_changes import ChangeBlock, ReferenceBlock
from gateway.http.anthropic.tools import CustomTool
from gateway.http.attribution import without_attribution
from gateway.http.events import encode_json
from gateway.http.messages import Strict

FAILED = "Error: "  # precedes the result of a tool that failed

Parsed = TypeVar("Parsed", bound=BaseModel)
Placed = tuple[str, Message]  # a turn, and the place in the request that it comes from


class Block(Strict):
    """A block, with what clients copy from an earlier answer."""

    harmless: ClassVar[Collection[str]] = fields.COPIED | {"citations", "caller"}
    where: ClassVar[str | None] = "messages[].content[]."


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Reasoning of an earlier turn; nothing here needs its signature."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Block):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def to_call(self) -> ToolCall:
        """The call; arguments that were no JSON are text again."""
        text = self.input.get(INVALID_JSON)
        is_text = isinstance(text, str) and len(self.input) == 1
        return ToolCall(self.id, self.name, str(text) if is_text else encode_json(self.input))


class ToolResultBlock(Block):
    """The answer of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock | ReferenceBlock] | None = None
    is_error: bool | None = None

    def to_message(self) -> Message:
        """A tool's turn. Chats have no flag for failures, so the text says it."""
        text = joined(self.content or ())
        return Message(
            "tool", f"{FAILED}{text}" if self.is_error else text, tool_call_id=self.tool_use_id
        )


class CompactionBlock(Block):
    """A summary in place of all that precedes it; without content, of an attempt that failed."""

    harmless: ClassVar[Collection[str]] = fields.COPIED | {"encrypted_content"}
    neutral: ClassVar[fields.Neutral] = {"tool_changes": ([],)}

    type: Literal["compaction"]
    content: str | None = None


Worded = TextBlock | ChangeBlock | ReferenceBlock
AnyBlock = Worded | ThinkingBlock | ToolUseBlock | ToolResultBlock | CompactionBlock
Kinds = Mapping[str, type[AnyBlock]]
_TEXT: Kinds = {"text": TextBlock}
_RETURNED: Kinds = {"text": TextBlock, "tool_reference": ReferenceBlock}
_CHANGES: Kinds = {"tool_addition": ChangeBlock, "tool_removal": ChangeBlock}
_SUMMARY: Kinds = {"compaction": CompactionBlock}
_KINDS: Mapping[str, Kinds] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock, **_CHANGES, **_SUMMARY},
    "system": {"text": TextBlock, **_CHANGES},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "tool_use": ToolUseBlock,
        **_SUMMARY,
    },
}
_ONCE = "next_user_message"


class TurnConfig(Strict):
    """The model's effort from a turn of the system on."""

    where: ClassVar[str | None] = "messages[].output_config."

    effort: str | None = None


class Turn(Strict):
    """One turn of the user, the assistant or, in between, the system."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[]."

    role: Literal["user", "assistant", "system"]
    content: list[AnyBlock]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnConfig | None = None

    def to_messages(self) -> list[Message]:
        """One turn of the assistant; of the user, one for each result of a tool and for text."""
        if self.role == "user":
            return list(_of_user(self.content))
        texts = [block for block in self.content if isinstance(block, Worded)]
        if self.role == "system":
            return [Message("system", joined(texts))] if texts else []
        thoughts = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        calls = [b.to_call() for b in self.content if isinstance(b, ToolUseBlock)]
        return [
            *_summaries(self.content),
            Message(
                "assistant",
                joined(texts) if texts else None,
                reasoning="\n".join(thoughts) if thoughts else None,
                tool_calls=tuple(calls),
            ),
        ]


def _of_user(blocks: list[AnyBlock]) -> Iterator[Message]:
    yield from _summaries(blocks)
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, Worded)):
        if is_text:
            yield Message("user", joined([b for b in group if isinstance(b, Worded)]))
            continue
        for block in group:
            if isinstance(block, ToolResultBlock):
                yield block.to_message()


def _summaries(blocks: list[AnyBlock]) -> list[Message]:
    """Summaries as turns of the user, with which a chat may begin."""
    found = [block for block in blocks if isinstance(block, CompactionBlock)]
    return [Message("user", block.content) for block in found if block.content]


def joined(blocks: Collection[Worded]) -> str:
    """The texts, one a line."""
    return "\n".join(block.text for block in blocks)


def _parse_turns(value: Any) -> Any:
    """Parses turns. Raises RequestError naming the block at fault."""
    if not isinstance(value, list):
        return value
    limits.check_count("messages", len(value), limits.MAX_MESSAGES)
    return [_parse_turn(f"messages[{index}]", turn) for index, turn in enumerate(value)]


def _parse_turn(path: str, turn: Any) -> Turn:
    if isinstance(turn, dict):
        role = turn.get("role")
        kinds = _KINDS.get(role) if isinstance(role, str) else None
        given = turn.get("content", [] if role == "system" and "output_config" in turn else None)
        if kinds is not None and given is not None:
            if not given and role == "user":
                raise invalid(f"{path}.content", "is empty")
            if not given and role == "system" and not turn.get("output_config"):
                raise invalid(f"{path}.content", "is empty")
            turn = turn | {"content": parse_blocks(f"{path}.content", given, kinds)}
    return validated(Turn, turn, path)


def parse_blocks(path: str, value: Any, kinds: Kinds = _TEXT) -> Any:
    """Blocks of these kinds, or text as one block. Raises RequestError."""
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        return value
    limits.check_count(path, len(value), limits.MAX_CONTENT_PARTS)
    parsed = (_parse_block(f"{path}[{index}]", one, kinds) for index, one in enumerate(value))
    return [block for block in parsed if block is not None]


def _parse_block(path: str, block: Any, kinds: Kinds) -> AnyBlock | None:
    """The block; None for one that says nothing to the models served here."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", f"must be one of {', '.join(kinds)}")
    if kind not in kinds:
        text = other_blocks.read(path, kind, block, kinds)
        return None if text is None else TextBlock(type="text", text=text)
    if kind == "tool_result":
        content = parse_blocks(f"{path}.content", block.get("content"), _RETURNED)
        block = block | {"content": content}
    return validated(kinds[kind], block, path)


def validated(kind: type[Parsed], value: Any, path: str) -> Parsed:
    """The value as a model. Raises RequestError naming the place below `path`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


Turns = Annotated[list[Turn], BeforeValidator(_parse_turns)]


def _parse_system(value: Any) -> Any:
    """Blocks without the line of attribution that the first may begin with."""
    blocks = parse_blocks("system", value)
    if not isinstance(blocks, list) or not blocks:
        return blocks
    text = without_attribution(blocks[0].text)
    if text == blocks[0].text:
        return blocks
    return [*([TextBlock(type="text", text=text)] if text else []), *blocks[1:]]


System = Annotated[
    list[TextBlock],
    BeforeValidator(_parse_system, json_schema_input_type=str | list[TextBlock]),
]


def to_turns(system: list[TextBlock] | None, turns: list[Turn]) -> list[Placed]:
    """The turns of the chat, each with its place in the request."""
    instruction = joined(system or ())
    found = [("system", Message("system", instruction))] if instruction else []
    for index, turn in _in_force(turns):
        found += [(f"messages[{index}]", message) for message in turn.to_messages()]
    return found


def _in_force(turns: list[Turn]) -> Iterator[tuple[int, Turn]]:
    """The turns that the model is shown, each with its index.

    A summary takes the place of what precedes it. A turn of the system that is said for one turn
    of the user is no longer shown once there is another.
    """
    first, start = _after_summary(turns)
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for index in range(first, len(turns)):
        turn = turns[index]
        if index == first and start:
            turn = turn.model_copy(update={"content": turn.content[start:]})
        if turn.clear_at != _ONCE or index > last_user:
            yield index, turn


def _after_summary(turns: list[Turn]) -> tuple[int, int]:
    """The index of the turn, and in it of the block, with the last summary; else the first."""
    for index in reversed(range(len(turns))):
        for place in reversed(range(len(turns[index].content))):
            block = turns[index].content[place]
            if isinstance(block, CompactionBlock) and block.content:
                return index, place
    return 0, 0


def added_tools(turns: list[Turn]) -> list[tuple[str, CustomTool]]:
    """The tools that turns define, each with its place in the request."""
    return [
        (f"messages[{index}].content[{place}].tool.definition", block.tool.definition)
        for index, turn in enumerate(turns)
        for place, block in enumerate(turn.content)
        if isinstance(block, ChangeBlock) and block.tool.definition is not None
    ]


def effort_of(turns: list[Turn]) -> str | None:
    """The effort that the last turn to name one asks for."""
    named = [turn.output_config.effort for turn in turns if turn.output_config is not None]
    return next((effort for effort in reversed(named) if effort is not None), None)
