"""Validates JSON schemas from clients and locates what is not supported.

A schema either constrains the output as JSON Schema (draft 2020-12) defines, or it is refused. The
grammar engine reports what it does not support but not where; and it ignores unknown keywords,
which must be refused here.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError, invalid, unsupported
from gateway.structure import keywords
from gateway.structure.exact.numbers import is_number, read_number
from gateway.structure.keywords import is_vendor, join

MAX_NESTING = 64
MAX_JSON_NESTING = 123  # the engine reads 127, with what is written around a schema
# Of one object, those that may be left out: each is a way to continue after each of the others.
MAX_FREE_PROPERTIES = 450
MAX_TRIES = 256  # parts tried in search of the one at fault

_ARRAYS = frozenset({"enum", "required"})
_OBJECTS = keywords.ALL_MAPS | {"dependentRequired", "dependencies"}
_BOUNDS = frozenset({"minimum", "maximum", "multipleOf"})
_EXCLUSIVE_BOUNDS = frozenset({"exclusiveMinimum", "exclusiveMaximum"})  # flags in older drafts
_FLAGS = frozenset({"uniqueItems", "nullable"})
_COUNTS = frozenset({"minItems", "maxItems"})


def check(schema: Any, place: str, *, is_loose: bool = False) -> None:
    """Raises RequestError naming the first place of the schema that is not supported.

    In a loose schema, which only describes, a keyword may be unknown.
    """
    _check_values(schema, place)
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise invalid(place, "is no Unicode text") from error
    if num_bytes > limits.MAX_SCHEMA_BYTES:
        raise invalid(place, f"has {num_bytes} bytes, at most {limits.MAX_SCHEMA_BYTES}")
    if schema is False:
        raise invalid(place, "allows nothing")
    _check(schema, place, 0, is_loose=is_loose)


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
            todo += [(part, join(where, str(name)), depth + 1) for name, part in value.items()]
        elif isinstance(value, list):
            todo += [(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(value)]


def parse(text: str, place: str) -> Any:
    """Parses a schema given as text. Raises RequestError naming `place`."""
    limits.check_bytes(place, text, limits.MAX_SCHEMA_BYTES)
    try:
        return json.loads(text, parse_float=read_number)
    except (ValueError, RecursionError) as error:
        raise invalid(place, f"is not JSON: {error}") from error


def _check(schema: Any, place: str, depth: int, *, is_loose: bool) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid(place, "must be an object, true or false")
    if depth > MAX_NESTING:
        raise invalid(place, f"is nested deeper than {MAX_NESTING} schemas")
    for keyword, value in schema.items():
        if is_loose and keyword not in keywords.KNOWN:
            continue
        _check_shape(keyword, value, join(place, keyword))
        if not is_loose:
            _check_bound(keyword, value, join(place, keyword))
        _check_keyword(keyword, value, schema, place)
    for part_place, part in parts_of(schema, place):
        _check(part, part_place, depth + 1, is_loose=is_loose)


def _check_shape(keyword: str, value: Any, where: str) -> None:
    """Raises RequestError for a value that is of another kind than its keyword's."""
    if keyword in _OBJECTS and not isinstance(value, dict):
        raise invalid(where, "must be an object")
    if (keyword in keywords.LISTS or keyword in _ARRAYS) and not isinstance(value, list):
        raise invalid(where, "must be an array")
    if keyword in _FLAGS and not isinstance(value, bool):
        raise invalid(where, "must be true or false")
    if keyword in _COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise invalid(where, "must be a number of items")
    names = value if isinstance(value, list) else [value]
    if keyword in ("required", "type") and not all(isinstance(name, str) for name in names):
        raise invalid(where, "must be names")
    if keyword in ("dependentRequired", "dependencies"):
        for name, needed in value.items():
            is_schema = keyword == "dependencies" and not isinstance(needed, list)
            if not is_schema and not _are_names(needed):
                raise invalid(join(where, name), "must be an array of names")


def _check_bound(keyword: str, value: Any, where: str) -> None:
    is_flag = isinstance(value, bool) and keyword in _EXCLUSIVE_BOUNDS
    if keyword in _BOUNDS | _EXCLUSIVE_BOUNDS and not is_number(value) and not is_flag:
        raise invalid(where, "must be a number")
    if keyword == "multipleOf" and value <= 0:
        raise invalid(where, "must be more than 0")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_keyword(keyword: str, value: Any, schema: dict[str, Any], place: str) -> None:
    where = join(place, keyword)
    if keyword not in keywords.KNOWN and not is_vendor(keyword):
        raise unsupported(where, "is not a keyword that this server supports in a schema")
    if keyword == "format" and isinstance(value, str) and value in keywords.OTHER_FORMATS:
        raise unsupported(where, f"{json.dumps(value)[:64]} is not supported in a schema")
    if keyword in ("enum", "const", "properties", "required"):
        _check_texts(list(value) if keyword == "properties" else value, where)
    if keyword == "properties":
        num_free = len(value.keys() - set(schema.get("required", ())))
        if num_free > MAX_FREE_PROPERTIES:
            most = MAX_FREE_PROPERTIES
            raise unsupported(where, f"{num_free} may be left out, at most {most} can be followed")
    if keyword == "minProperties" and isinstance(value, int):
        # A generated map may repeat a key, so more than one cannot be guaranteed.
        required = schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if value > max(1, num_required):
            raise unsupported(
                where, f"{value} keys cannot be guaranteed, {num_required} are required"
            )


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


def parts_of(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of the schemas inside a schema."""
    for keyword, value in schema.items():
        where = join(place, keyword)
        if keyword in keywords.ALL_MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield join(where, name), part
        elif keyword == "dependencies" and isinstance(value, dict):
            yield from (
                (join(where, name), part) for name, part in value.items() if type(part) is not list
            )
        elif isinstance(value, list) and (keyword in keywords.LISTS or keyword == "items"):
            for index, part in enumerate(value):
                yield f"{where}[{index}]", part
        elif keyword in keywords.ALL_SINGLE:
            yield where, value


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
        parts = [(where, part) for where, part in parts_of(schema, place) if isinstance(part, dict)]
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
