"""`context_management` of the Messages API: what is taken out of a long conversation.

Each edit is a function of the turns and of the number of tokens that the prompt has, so the same
request is always edited alike. An edit that would have a model sum up turns is refused by name once
it is due.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http.anthropic.blocks import (
    AnyBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    validated,
)
from gateway.http.anthropic.measure import Measure
from gateway.http.messages import Strict

CLEARED = "[The result of this call was cleared to shorten the conversation]"
TRIGGER_TOKENS, KEPT_USES, KEPT_THOUGHTS = 100_000, 3, 1  # Anthropic's defaults
COMPACTED_TOKENS = 150_000  # the same

Cleared = tuple[list[Turn], int]  # the turns without what was cleared, and how much that was


class Amount(Strict):
    """So many tokens, uses of tools or turns with thoughts."""

    where: ClassVar[str | None] = "context_management.edits[]."

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: int | None = None

    def number(self, path: str, *kinds: str) -> int:
        """The number. Raises RequestError for one of another kind."""
        if self.type not in kinds:
            raise invalid(f"{path}.type", f"must be one of {', '.join(kinds)}")
        if self.value is None or self.value < 0:
            raise invalid(f"{path}.value", "must be a number that is not negative")
        return self.value


class Edit(Strict):
    """The fields that all edits have."""

    where: ClassVar[str | None] = "context_management.edits[]."


class ClearThinking(Edit):
    """Takes the thoughts of all but the last turns that have some."""

    type: Literal["clear_thinking_20251015"]
    keep: Amount | Literal["all"] | None = None

    async def apply(self, path: str, turns: list[Turn], measure: Measure) -> Cleared:
        """The turns without old thoughts. Raises RequestError."""
        if self.keep == "all" or (isinstance(self.keep, Amount) and self.keep.type == "all"):
            return turns, 0
        kept = KEPT_THOUGHTS
        if isinstance(self.keep, Amount):
            kept = self.keep.number(f"{path}.keep", "thinking_turns")
        have = [i for i, turn in enumerate(turns) if any(map(_is_thought, turn.content))]
        old = set(have[: max(len(have) - kept, 0)])
        return [_without_thoughts(t) if i in old else t for i, t in enumerate(turns)], len(old)

    def told(self, num_cleared: int) -> dict[str, Any]:
        """The edit that was done, as answers tell it."""
        return {"type": self.type, "cleared_thinking_turns": num_cleared}


class ClearToolUses(Edit):
    """Takes the results of all but the last calls once the conversation is long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Amount | None = None
    keep: Amount | None = None
    clear_at_least: Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    async def apply(self, path: str, turns: list[Turn], measure: Measure) -> Cleared:
        """The turns with old results replaced by a word of it. Raises RequestError."""
        uses = {use.id: use.name for use in _uses(turns)}
        if not await self._is_due(path, len(uses), turns, measure):
            return turns, 0
        old = self._old(path, uses)
        results = [r for turn in turns for r in turn.content if isinstance(r, ToolResultBlock)]
        cleared = {r.tool_use_id for r in results if r.tool_use_id in old and not _is_cleared(r)}
        if not cleared:
            return turns, 0
        edited = [self._without(turn, cleared) for turn in turns]
        if self.clear_at_least is not None:
            least = self.clear_at_least.number(f"{path}.clear_at_least", "input_tokens")
            if await measure.num_tokens(turns) - await measure.num_tokens(edited) < least:
                return turns, 0
        return edited, len(cleared)

    async def _is_due(self, path: str, num_uses: int, turns: list[Turn], measure: Measure) -> bool:
        if self.trigger is None:
            return await measure.exceeds(turns, TRIGGER_TOKENS)
        limit = self.trigger.number(f"{path}.trigger", "input_tokens", "tool_uses")
        if self.trigger.type == "tool_uses":
            return num_uses > limit
        return await measure.exceeds(turns, limit)

    def _old(self, path: str, uses: dict[str, str]) -> set[str]:
        """The ids of the calls whose results may go."""
        kept = KEPT_USES
        if self.keep is not None:
            kept = self.keep.number(f"{path}.keep", "tool_uses")
        ids = list(uses)
        excluded = self.exclude_tools or ()
        return {i for i in ids[: max(len(ids) - kept, 0)] if uses[i] not in excluded}

    def _without(self, turn: Turn, cleared: Collection[str]) -> Turn:
        content = [self._cleared(block, cleared) for block in turn.content]
        return turn.model_copy(update={"content": content})

    def _cleared(self, block: AnyBlock, cleared: Collection[str]) -> AnyBlock:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
            return block.model_copy(update={"content": [TextBlock(type="text", text=CLEARED)]})
        if isinstance(block, ToolUseBlock) and block.id in cleared and self._takes(block.name):
            return block.model_copy(update={"input": {}})
        return block

    def _takes(self, name: str) -> bool:
        """True if the arguments of a tool's old calls go, too."""
        asked = self.clear_tool_inputs
        return name in asked if isinstance(asked, list) else bool(asked)

    def told(self, num_cleared: int) -> dict[str, Any]:
        """The edit that was done, as answers tell it."""
        return {"type": self.type, "cleared_tool_uses": num_cleared}


class Compact(Edit):
    """Would have a model sum up the conversation once it is long."""

    type: Literal["compact_20260112"]
    trigger: Amount | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None

    async def apply(self, path: str, turns: list[Turn], measure: Measure) -> Cleared:
        """The turns as they are. Raises RequestError for a conversation that has become long."""
        limit = COMPACTED_TOKENS
        if self.trigger is not None:
            limit = self.trigger.number(f"{path}.trigger", "input_tokens")
        if await measure.exceeds(turns, limit):
            problem = f"the prompt exceeds {limit} tokens, and no conversation is summed up here"
            raise unsupported(f"{path}.trigger", problem)
        return turns, 0

    def told(self, num_cleared: int) -> dict[str, Any]:
        """The edit that was done, as answers tell it."""
        return {"type": self.type}


AnyEdit = ClearThinking | ClearToolUses | Compact
_EDITS: dict[str, type[AnyEdit]] = {
    "clear_thinking_20251015": ClearThinking,
    "clear_tool_uses_20250919": ClearToolUses,
    "compact_20260112": Compact,
}
_PLACE = "context_management.edits"


def _parse_edits(value: Any) -> Any:
    """Edits by their type. Raises RequestError naming the one at fault."""
    if not isinstance(value, list):
        return value
    limits.check_count(_PLACE, len(value), limits.MAX_CONTEXT_EDITS)
    return [_parse_edit(f"{_PLACE}[{index}]", edit) for index, edit in enumerate(value)]


def _parse_edit(path: str, edit: Any) -> AnyEdit:
    kind = edit.get("type") if isinstance(edit, dict) else None
    if not isinstance(kind, str) or kind not in _EDITS:
        raise unsupported(f"{path}.type", f"must be one of {', '.join(_EDITS)}")
    return validated(_EDITS[kind], edit, path)


class ContextManagement(Strict):
    """The edits of a long conversation, in this order."""

    where: ClassVar[str | None] = "context_management."

    edits: Annotated[list[AnyEdit], BeforeValidator(_parse_edits)] | None = None


@dataclass(frozen=True, slots=True)
class Edited:
    """A conversation after its edits, and what was done, as answers say it."""

    turns: list[Turn]
    applied: list[dict[str, Any]] = field(default_factory=list)


async def edited(asked: ContextManagement | None, turns: list[Turn], measure: Measure) -> Edited:
    """The turns that the model is shown. Raises RequestError for an edit that cannot be made."""
    applied = []
    for index, edit in enumerate(() if asked is None else asked.edits or ()):
        kept, num_cleared = await edit.apply(f"{_PLACE}[{index}]", turns, measure)
        if num_cleared:
            saved = await measure.num_tokens(turns) - await measure.num_tokens(kept)
            applied.append({**edit.told(num_cleared), "cleared_input_tokens": saved})
        turns = kept
    return Edited(turns, applied)


def _uses(turns: list[Turn]) -> Iterator[ToolUseBlock]:
    for turn in turns:
        yield from (block for block in turn.content if isinstance(block, ToolUseBlock))


def _is_thought(block: AnyBlock) -> bool:
    return isinstance(block, ThinkingBlock)


def _is_cleared(result: ToolResultBlock) -> bool:
    return [block.text for block in result.content or ()] == [CLEARED]


def _without_thoughts(turn: Turn) -> Turn:
    content = [block for block in turn.content if not _is_thought(block)]
    return turn.model_copy(update={"content": content})
