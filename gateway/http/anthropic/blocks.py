"""Turns of the Messages API: blocks of content, and their conversion to turns of a chat."""

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from gateway import limits
from gateway.chat.conversation import INVALID_JSON, Message, ToolCall
from gateway.errors import invalid, unsupported
from gateway.http import fields
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
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock] | None = None
    is_error: bool | None = None

    def to_message(self) -> Message:
        """A tool's turn. Chats have no flag for failures, so the text says it."""
        text = _joined(self.content or ())
        return Message(
            "tool", f"{FAILED}{text}" if self.is_error else text, tool_call_id=self.tool_use_id
        )


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_TEXT: Mapping[str, type[AnyBlock]] = {"text": TextBlock}
_KINDS: Mapping[str, Mapping[str, type[AnyBlock]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "system": _TEXT,
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


class Turn(Strict):
    """One turn of the user, the assistant or, in between, the system."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[]."

    role: Literal["user", "assistant", "system"]
    content: list[AnyBlock]

    def to_messages(self) -> list[Message]:
        """One turn of the assistant; of the user, one for each result of a tool and for text."""
        if self.role == "user":
            return list(_of_user(self.content))
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if self.role == "system":
            return [Message("system", _joined(texts))]
        thoughts = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        calls = [b.to_call() for b in self.content if isinstance(b, ToolUseBlock)]
        return [
            Message(
                "assistant",
                _joined(texts) if texts else None,
                reasoning="\n".join(thoughts) if thoughts else None,
                tool_calls=tuple(calls),
            )
        ]


def _of_user(blocks: list[AnyBlock]) -> Iterator[Message]:
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            yield Message("user", _joined([b for b in group if isinstance(b, TextBlock)]))
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            yield block.to_message()


def _joined(blocks: Collection[TextBlock]) -> str:
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
        if kinds is not None and "content" in turn:
            content = parse_blocks(f"{path}.content", turn["content"], kinds)
            if not content and role != "assistant":
                raise invalid(f"{path}.content", "is empty")
            turn = turn | {"content": content}
    return validated(Turn, turn, path)


def parse_blocks(path: str, value: Any, kinds: Mapping[str, type[AnyBlock]] = _TEXT) -> Any:
    """Blocks of these kinds, or text as one block. Raises RequestError."""
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        return value
    limits.check_count(path, len(value), limits.MAX_CONTENT_PARTS)
    return [_parse_block(f"{path}[{index}]", block, kinds) for index, block in enumerate(value)]


def _parse_block(path: str, block: Any, kinds: Mapping[str, type[AnyBlock]]) -> AnyBlock:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", f"must be one of {', '.join(kinds)}")
    if kind not in kinds:
        problem = f"{kind[:64]!r} is not supported here, only {', '.join(kinds)}"
        raise unsupported(f"{path}.type", problem)
    if kind == "tool_result":
        block = block | {"content": parse_blocks(f"{path}.content", block.get("content"))}
    return validated(kinds[kind], block, path)


def validated(kind: type[Parsed], value: Any, path: str) -> Parsed:
    """The value as a model. Raises RequestError naming the place below `path`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


Turns = Annotated[list[Turn], BeforeValidator(_parse_turns)]


def _parse_system(value: Any) -> Any:
    return parse_blocks("system", value)


System = Annotated[
    list[TextBlock],
    BeforeValidator(_parse_system, json_schema_input_type=str | list[TextBlock]),
]


def to_turns(system: list[TextBlock] | None, turns: list[Turn]) -> list[Placed]:
    """The turns of the chat, each with its place in the request."""
    instruction = _joined(system or ())
    found = [("system", Message("system", instruction))] if instruction else []
    for index, turn in enumerate(turns):
        found += [(f"messages[{index}]", message) for message in turn.to_messages()]
    return found
