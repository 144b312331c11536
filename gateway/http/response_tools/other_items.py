"""Items of POST /v1/responses that belong to tools which do not run here, as items of a chat.

What a caller's own tool was called with and returned is told as a call and its result, and so is
what another server ran for the model, where the item says what came of it. Other items of that kind
are left out, and the caller hears of both.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import notices

Item = Mapping[str, Any]
Items = list[dict[str, Any]]

# Calls that the caller ran: the name that the model is told, and where the arguments stand.
_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
_RESULTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output")
LEFT_OUT = frozenset(
    {"web_search_call", "image_generation_call", "computer_call", "computer_call_output"}
    | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call"}
    | {"program", "program_output", "compaction", "compaction_summary", "context_compaction"}
    | {"ghost_snapshot", "web_fetch_call"}
)


def is_other(kind: str) -> bool:
    """True if items of this type are of tools that do not run here."""
    return kind in LEFT_OUT or kind in _CALLS or kind in _RESULTS or kind in _RAN_ELSEWHERE


def as_items(path: str, kind: str, item: Item) -> Items:
    """The same as calls and results; empty for what says nothing. Raises RequestError."""
    if kind in _CALLS:
        name, field = _CALLS[kind]
        return [_call(_id_of(item), name, item.get(field))]
    if kind in _RESULTS:
        return [_result(_id_of(item), item.get("output"))]
    if kind in _RAN_ELSEWHERE and (told := _RAN_ELSEWHERE[kind](item)):
        notices.ignore(f"{path}.type", f"{kind!r} ran on another server, and is told as a call")
        return told
    problem = f"{kind!r} says nothing to this model, and was left out of the prompt"
    notices.ignore(f"{path}.type", problem)
    return []


def _id_of(item: Item) -> str:
    found = item.get("call_id") or item.get("id")
    return found if isinstance(found, str) else ""


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}


def _result(call_id: str, output: Any) -> dict[str, Any]:
    text = output if isinstance(output, str) else json.dumps("" if output is None else output)
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _pair(item: Item, name: str, arguments: Any, output: Any) -> Items:
    call_id = _id_of(item)
    return [_call(call_id, name, arguments), _result(call_id, output)]


def _mcp_call(item: Item) -> Items:
    output = item.get("output")
    if output is None:
        output = item.get("error")
    names = (item.get("server_label"), item.get("name"))
    name = ".".join(name for name in names if isinstance(name, str) and name)
    return _pair(item, name or "mcp", item.get("arguments"), output)


def _file_search_call(item: Item) -> Items:
    results = item.get("results")
    return _pair(item, "file_search", {"queries": item.get("queries")}, results) if results else []


def _code_interpreter_call(item: Item) -> Items:
    outputs = item.get("outputs")
    arguments = {"code": item.get("code")}
    return _pair(item, "code_interpreter", arguments, outputs) if item.get("code") else []


_RAN_ELSEWHERE: Mapping[str, Callable[[Item], Items]] = {
    "mcp_call": _mcp_call,
    "file_search_call": _file_search_call,
    "code_interpreter_call": _code_interpreter_call,
}
