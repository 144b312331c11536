"""Validates JSON schemas from clients and locates what is not supported.

A schema either constrains the output as JSON Schema (draft 2020-12) defines, or it is refused. The
grammar engine reports what it does not support but not where; and it ignores unknown keywords,
which must be refused here.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway import limits
from gateway.errors import ErrorKind, RequestError, invalid, unsupported

MAX_NESTING = 64
MAX_JSON_NESTING = 123  # the engine reads 127, with what is written around a schema
MAX_TRIES = 256  # parts tried in search of the one at fault

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties"})
_VALUES = frozenset(
    {"type", "enum", "const", "$ref", "$id", "$anchor", "required"}
    | {"minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Annotations, which do not constrain the JSON.
_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated"}
    | {"readOnly", "writeOnly", "$comment", "$schema", "discriminator"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
)
_KNOWN = _MAPS | _LISTS | _SINGLE | _VALUES | _NOTES
# Unsupported keywords that are accepted with a value that constrains nothing.
_NEUTRAL = {"uniqueItems": False, "nullable": False}

_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")


def check(schema: Any, place: str) -> None:
    """Raises RequestError naming the first place of the schema that is not supported."""
    _check_values(schema, place)
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise invalid(place, "is no Unicode text") from error
    if num_bytes > limits.MAX_SCHEMA_BYTES:
        raise invalid(place, f"has {num_bytes} bytes, at most {limits.MAX_SCHEMA_BYTES}")
    if schema is False:
        raise invalid(place, "allows nothing")
    _check(schema, place, 0)


def _check_values(schema: Any, place: str) -> None:
    """Raises RequestError for numbers that JSON cannot hold, and for values nested too deeply.

    Python's JSON reader takes NaN, Infinity and integers of any length; the engine's does not.
    """
    num_values, todo = 0, [(schema, place, 0)]
    while todo:
        value, where, depth = todo.pop()
        num_values += 1
        if num_values > limits.MAX_SCHEMA_BYTES:
            most = limits.MAX_SCHEMA_BYTES
            raise invalid(place, f"has more than {most} values, at most {most} bytes are allowed")
        if depth > MAX_JSON_NESTING:
            raise invalid(place, f"is nested deeper than {MAX_JSON_NESTING} values")
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(where, "is not a finite number")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise invalid(where, "is a number out of range")
        if isinstance(value, dict):
            todo += [(part, _join(where, str(name)), depth + 1) for name, part in value.items()]
        elif isinstance(value, list):
            todo += [(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(value)]


def without_neutral(schema: Any) -> Any:
    """A checked schema without the keywords that constrain nothing."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword in _MAPS:
            value = {name: without_neutral(part) for name, part in value.items()}
        elif keyword in _LISTS:
            value = [without_neutral(part) for part in value]
        elif keyword in _SINGLE:
            value = without_neutral(value)
        if keyword not in _NEUTRAL:
            kept[keyword] = value
    return kept


def parse(text: str, place: str) -> Any:
    """Parses a schema given as text. Raises RequestError naming `place`."""
    limits.check_bytes(place, text, limits.MAX_SCHEMA_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(place, f"is not JSON: {error}") from error


def _check(schema: Any, place: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid(place, "must be an object, true or false")
    if depth > MAX_NESTING:
        raise invalid(place, f"is nested deeper than {MAX_NESTING} schemas")
    for keyword, value in schema.items():
        _check_keyword(keyword, value, schema, place)
    for part_place, part in _parts(schema, place):
        _check(part, part_place, depth + 1)


def _check_keyword(keyword: str, value: Any, schema: dict[str, Any], place: str) -> None:
    where = _join(place, keyword)
    if keyword in _NEUTRAL and value is not _NEUTRAL[keyword]:
        raise unsupported(where, "is not supported in a schema")
    if keyword in _MAPS and not isinstance(value, dict):
        raise invalid(where, "must be an object")
    if keyword in _LISTS and not isinstance(value, list):
        raise invalid(where, "must be an array")
    if keyword not in _KNOWN and keyword not in _NEUTRAL and not _is_vendor(keyword):
        raise unsupported(where, "is not a keyword that this server supports in a schema")
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
        raise unsupported(where, "must be a number, as in every draft since 6")
    if keyword in ("enum", "const", "properties", "required"):
        _check_texts(list(value) if keyword == "properties" else value, where)
    if keyword == "minProperties" and isinstance(value, int):
        # A generated map may repeat a key, so more than one cannot be guaranteed.
        required = schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if value > max(1, num_required):
            raise unsupported(
                where, f"{value} keys cannot be guaranteed, {num_required} are required"
            )


def _is_vendor(keyword: str) -> bool:
    return keyword.startswith("x-") and keyword != "x-guidance"


def _check_texts(value: Any, place: str) -> None:
    """Raises RequestError for control characters without a short escape: they are unsupported."""
    if isinstance(value, str):
        if any(ord(character) < 0x20 and character not in "\b\t\n\f\r" for character in value):
            raise unsupported(place, "has a control character, which is not supported")
    elif isinstance(value, dict):
        _check_texts([*value, *value.values()], place)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, place)


def _parts(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of the schemas inside a schema."""
    for keyword, value in schema.items():
        where = _join(place, keyword)
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield _join(where, name), part
        elif keyword in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield f"{where}[{index}]", part
        elif keyword in _SINGLE:
            yield where, value


def _join(place: str, name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return f"{place}.{name}"
    return f"{place}[{json.dumps(name[:64])}]"


def refusal(
    schema: Any, place: str, problem: str, find: Callable[[Iterable[Any]], int | None]
) -> RequestError:
    """The error for a schema that the engine refuses; names the smallest part with that problem.

    `find` returns the index of the first of some schemas that has the problem.
    """
    root = schema if isinstance(schema, dict) else {}
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    tries = MAX_TRIES
    while tries and isinstance(schema, dict):
        parts = [(where, part) for where, part in _parts(schema, place) if isinstance(part, dict)]
        parts = parts[:tries]
        tries -= len(parts)
        found = find(shared | part for _, part in parts)
        if found is None:
            break
        place, schema = parts[found]
    kind = ErrorKind.INVALID
    if problem.startswith(("Unimplemented", "Unknown format", "oneOf constraints")):
        kind = ErrorKind.UNSUPPORTED
    return RequestError(kind, f"{place}: {problem}", field=place)
