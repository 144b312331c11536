"""Blocks of the Messages API besides those of a chat: as text, as nothing, or refused by name.

What a server ran for another model, and what only its maker can read, says nothing to the models
served here. What is text in another wrapping is read as text.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gateway.errors import notices
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import media

SEALED = "redacted_thinking"  # only its maker can read it
RAN_ELSEWHERE = (
    *("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "container_upload", "fallback"),
)
RESULT = "_tool_result"  # ends the type of each block with what a server's tool returned
Block = Mapping[str, Any]


def read(path: str, kind: str, block: Block, known: Collection[str]) -> str | None:
    """The text of a block whose type is none of the `known` ones; None where it says nothing.

    Raises RequestError for a block that would say something to another model.
    """
    if "tool_use" in known and _is_of_another_server(kind):
        if kind != SEALED:
            problem = f"{kind!r} ran on another server and was left out of the prompt"
            notices.ignore("messages[].content[].type", problem)
        return None
    if kind in _READERS and "tool_use" not in known:
        return _READERS[kind](path, block)
    if media.is_left_out(kind, block):
        return None
    return media.mark_of(f"{path}.type", kind, block, known)


def _is_of_another_server(kind: str) -> bool:
    return kind in (SEALED, *RAN_ELSEWHERE) or kind.endswith(RESULT)


def _text_of(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(path, "must be text")
    return value


def _texts_of(path: str, value: Any) -> str:
    """Text, or blocks of it joined. Raises RequestError for other blocks."""
    if not isinstance(value, list):
        return _text_of(path, value)
    texts = []
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise unsupported(f"{path}[{index}].type", "only 'text' is supported here")
        texts.append(_text_of(f"{path}[{index}].text", block.get("text")))
    return "\n".join(texts)


def _search_result(path: str, block: Block) -> str:
    head = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
    return "\n".join([*head, _texts_of(f"{path}.content", block.get("content"))])


def _document(path: str, block: Block) -> str | None:
    """The text of a document that is text. Raises RequestError for one that is a file."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if source is None or kind not in ("text", "content"):
        if media.is_left_out("document", block):
            return None
        raise unsupported(f"{path}.type", media.FILE)
    name = "data" if kind == "text" else "content"
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return "\n".join([*head, _texts_of(f"{path}.source.{name}", source.get(name))])


_READERS: Mapping[str, Callable[[str, Block], str | None]] = {
    "search_result": _search_result,
    "document": _document,
}
