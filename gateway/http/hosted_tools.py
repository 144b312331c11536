"""Tools that a server would have to run: the model is not told of them, and their caller hears it.

They are of the service that a client was written for. A client lists them without being asked, and
works without them.
"""

import re
from typing import Any

from pydantic import BaseModel

from gateway.errors import notices
from gateway.errors.request_errors import unsupported

OPENAI = frozenset(
    {"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"}
    | {"mcp", "computer", "computer_use", "computer_use_preview", "local_shell", "shell"}
    | {"apply_patch", "tool_search", "programmatic_tool_calling", "web_fetch", "browser_search"}
)
# A version of one of them, and each tool of Anthropic's own, ends with a date.
_DATED = re.compile(r"[a-z][a-z0-9_]*_20\d\d_?\d\d_?\d\d")
_SET = "mcp_toolset"


class HostedTool(BaseModel):
    """A tool that is left out; what else its definition says is not read."""

    type: str
    name: str | None = None


def is_hosted(kind: Any) -> bool:
    """True if a tool's type is one that a server would have to run."""
    return isinstance(kind, str) and (
        kind in OPENAI or kind == _SET or _DATED.fullmatch(kind[:64]) is not None
    )


def left_out(path: str, tool: dict[str, Any]) -> HostedTool:
    """The tool, once its caller is told. Raises RequestError where the caller would not hear it."""
    kind, name = tool["type"], tool.get("name")
    problem = f"{kind!r} would run on the server, which has none, and was left out of the prompt"
    notices.ignore(f"{path}.type", problem)
    return HostedTool(type=kind, name=name if isinstance(name, str) else None)


def refuse_choice(path: str, kind: Any) -> None:
    """Raises RequestError for a choice that forces the model to call such a tool."""
    if is_hosted(kind):
        raise unsupported(path, f"{kind!r} would run on the server, which has none")
