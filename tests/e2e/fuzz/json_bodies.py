"""Bodies of the HTTP API: valid ones, changed at random; field names come from the schema."""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness.services import ROOT
from tests.e2e.fuzz import values
from tests.e2e.fuzz.case import Case

TARGET = "http"
OPENAPI = ROOT / "docs" / "openapi.json"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EMBEDDING, RESPONSE = "/v1/embeddings", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RERANK, SCORE = "/v1/rerank", "/v1/score"
_TURN = {"role": "user", "content": "Hello"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}},
}
_STRICT = {
    "type": "function",
    "function": _TOOL["function"] | {"strict": True},
}
_CUSTOM = {"name": "f", "input_schema": {"type": "object"}}
_FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}}
_USED = [
    _TURN,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]},
]
_REWRITTEN: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "not": {"enum": [1, 2]}, "nullable": True}},
    "if": {"properties": {"a": {"const": 3}}, "required": ["a"]},
    "then": {"properties": {"b": {"items": {"enum": [1, 2]}, "uniqueItems": True}}},
    "dependentRequired": {"b": ["a"]},
    "propertyNames": {"enum": ["a", "b"]},
}
_TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": _REWRITTEN, "end": "</a>"}],
    "triggers": ["<a"],
}
_TAG_FORMAT: dict[str, Any] = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"},
        {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}]},
    ],
}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [_TURN], "max_tokens": 2}),
    (CHAT, {"messages": [_TURN], "max_tokens": 2, "stream": True, "n": 2, "seed": 1}),
    (CHAT, {"messages": [_TURN], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [_TURN], "max_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"}),
    (CHAT, {"messages": [_TURN], "max_tokens": 4, "response_format": _FORMAT}),
    (CHAT, {"messages": [_TURN], "max_tokens": 4, "tools": [_STRICT], "seed": 1}),
    (CHAT, {"messages": [_TURN], "max_tokens": 4, "tools": [_STRICT], "response_format": _FORMAT}),
    (CHAT, {"messages": [_TURN], "max_tokens": 4, "guided_json": _REWRITTEN}),
    (COMPLETION, {"prompt": "a", "max_tokens": 4, "guided_json": _REWRITTEN}),
    (COMPLETION, {"prompt": "a", "max_tokens": 4, "response_format": _TAGS}),
    (
        CHAT,
        {
            "messages": [_TURN],
            "max_tokens": 4,
            "response_format": {"type": "structural_tag", "format": _TAG_FORMAT},
            "thinking_token_budget": 2,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "system", "content": [{"type": "text", "text": "Be"}]}, _TURN],
            "max_completion_tokens": 2,
            "stop": ["a", "b"],
            "logit_bias": {"5": 1.5},
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
    ),
    (COMPLETION, {"prompt": "Hello", "max_tokens": 2, "temperature": 0}),
    (COMPLETION, {"prompt": ["a", [5, 6]], "max_tokens": 2, "stream": True, "top_k": 5}),
    (COMPLETION, {"prompt": [5, 6], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (COMPLETION, {"prompt": "a", "max_tokens": 2, "guided_choice": ["yes", "no"]}),
    (COMPLETION, {"prompt": "a", "max_tokens": 3, "guided_regex": "[ab]+", "min_p": 0.1}),
    (COMPLETION, {"prompt": "a", "max_tokens": 3, "bad_words": ["b"], "min_tokens": 1}),
    (EMBEDDING, {"input": ["a", "b"], "encoding_format": "float"}),
    (RESPONSE, {"input": "Hello", "max_output_tokens": 2}),
    (RESPONSE, {"input": "Hello", "max_output_tokens": 2, "store": True, "stream": True}),
    (RESPONSE, {"input": "Hello", "max_output_tokens": 2, "previous_response_id": "resp_1"}),
    (RESPONSE, {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2}),
    (MESSAGES, {"messages": [_TURN], "max_tokens": 2, "system": "Be"}),
    (MESSAGES, {"messages": _USED, "max_tokens": 2, "stream": True, "tools": [_CUSTOM]}),
    (MESSAGES, {"messages": [_TURN], "max_tokens": 4, "output_config": {"format": _FORM}}),
    (
        MESSAGES,
        {
            "messages": [_TURN],
            "max_tokens": 8,
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "tools": [_CUSTOM | {"strict": True}],
        },
    ),
    (COUNT, {"messages": _USED, "tools": [_CUSTOM], "tool_choice": {"type": "auto"}}),
    (RERANK, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    (SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": True}),
    ("/tokenize", {"messages": [_TURN]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)


class Bodies:
    """Draws cases."""

    def __init__(self) -> None:
        schemas = json.loads(OPENAPI.read_text())["components"]["schemas"]
        self._kinds: dict[str, list[str]] = {}  # of values, by field
        for schema in schemas.values():
            for name, about in schema.get("properties", {}).items():
                kinds = [about, *about.get("anyOf", ())]
                self._kinds[name] = [one["type"] for one in kinds if "type" in one] or ["object"]
        self._names = sorted(self._kinds)

    def draw(self, rng: random.Random) -> Case:
        """A body that differs from a valid one in one to three places."""
        route, body = rng.choice(VALID)
        body = copy.deepcopy(body)
        for _ in range(rng.choice((1, 1, 2, 3))):
            self._change(body, rng)
        payload = _encode(body)
        if rng.random() < 0.1:
            payload = change_bytes(payload, rng)
        return Case(TARGET, route, payload)

    def _change(self, body: dict[str, Any], rng: random.Random) -> None:
        places = list(_places(body))
        kind = rng.random()
        if kind < 0.45 or not places:
            name = rng.choice(self._names)
            body[name] = self._value(name, rng)
        elif kind < 0.85:
            holder, key = rng.choice(places)
            holder[key] = self._value(key, rng)
        elif kind < 0.93:
            holder, key = rng.choice(places)
            del holder[key]
        else:
            holder, key = rng.choice(places)
            holder[key] = [holder[key]] * rng.choice((2, 3, 70, 1100))

    def _value(self, name: Any, rng: random.Random) -> Any:
        """A value of the kind that the field takes, more often than of any."""
        if name not in self._kinds or rng.random() < 0.3:
            return values.anything(rng)
        return values.of_kind(rng.choice(self._kinds[name]), rng)


def change_bytes(payload: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed, lost or repeated."""
    changed = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.choice((1, 1, 4, 100))]
            case 2:
                changed[at:at] = changed[at : at + rng.choice((1, 4, 50))]
            case _:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
    return bytes(changed)


def _encode(body: Any) -> bytes:
    try:
        text = json.dumps(body)
    except (ValueError, RecursionError):
        return b"{"
    return text.replace(json.dumps(values.HUGE_MARK), values.HUGE).encode()


def _places(body: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every value within, as its holder and its key."""
    keys: Sequence[Any] = ()
    if isinstance(body, dict):
        keys = list(body)
    elif isinstance(body, list):
        keys = range(min(len(body), 5))
    for key in keys:
        yield body, key
        if depth < 8:
            yield from _places(body[key], depth + 1)
