"""Blocks by which a conversation of the Messages API changes its tools on the way.

The model is told of every tool at the start, those that are added later included, so that what it
is told first stays the same. A change is a sentence where it stands.
"""

from collections.abc import Collection
from typing import ClassVar, Literal

from gateway.http import fields
from gateway.http.anthropic.tools import CustomTool
from gateway.http.messages import Strict

_WHAT = {"tool_addition": "can be called now", "tool_removal": "can no longer be called"}


class ChangedTool(Strict):
    """A tool by its name, or as it stands in `tools`."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].content[].tool."

    type: str
    name: str | None = None
    tool_name: str | None = None
    server_name: str | None = None
    definition: CustomTool | None = None

    @property
    def shown(self) -> str:
        """The name by which the model knows it."""
        if self.definition is not None:
            return self.definition.name
        return self.name or self.tool_name or self.server_name or self.type


class ChangeBlock(Strict):
    """Adds a tool to those that may be called from here on, or takes one away."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].content[]."

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool

    @property
    def text(self) -> str:
        """The change as a sentence for the model."""
        return f"The tool {self.tool.shown} {_WHAT[self.type]}."


class ReferenceBlock(Strict):
    """A tool that a search found."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].content[]."

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The sentence that tells the model of the tool."""
        return f"The tool {self.tool_name} {_WHAT['tool_addition']}."
