"""Finds schemas that ask for nothing but text, and the length that it may have. Pure.

Some models write arguments as plain text. Where a schema's text can be described by its length or
its choices alone it is written as it is; all else is written as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.structure.keywords import NOTES, is_vendor
from gateway.structure.references import resolve

MAX_NESTING = 8  # of unions and references
MAX_VISITS = 1024  # of parts of one schema
_OF_VALUES = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_TYPES = ("string", "null")


@dataclass(frozen=True, slots=True)
class PlainText:
    """The values of a schema, if they are text, or text and null."""

    options: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int | None], ...] = ()  # least and most characters of other text
    allows_null: bool = False

    def __or__(self, other: "PlainText") -> "PlainText":
        return PlainText(
            self.options + other.options,
            self.lengths + other.lengths,
            self.allows_null or other.allows_null,
        )


ANY = PlainText(lengths=((0, None),))


def plain_text(schema: Any, root: Mapping[str, Any]) -> PlainText | None:
    """The values of a schema, if text of some length or of some choices, and perhaps null.

    `root` has the definitions. None: another form, or one that only a grammar can tell.
    """
    found = _Reading(root).read(schema, 0)
    return found if found is not None and (found.options or found.lengths) else None


class _Reading:
    """The reading of one schema, which ends after so many parts: they may name each other."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_VISITS

    def read(self, schema: Any, depth: int) -> PlainText | None:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_NESTING or self._num_left < 0:
            return None
        keys = {key for key in schema if key not in NOTES and not is_vendor(key)}
        if keys == {"$ref"}:
            return self.read(resolve(schema["$ref"], self._root), depth + 1)
        if keys == {"anyOf"}:
            return self._union(schema["anyOf"], depth)
        return _values(schema) if keys <= _OF_VALUES else None

    def _union(self, parts: Any, depth: int) -> PlainText | None:
        union = PlainText()
        for part in parts if isinstance(parts, list) else [None]:
            found = self.read(part, depth + 1)
            if found is None:
                return None
            union = union | found
        return union


def _values(schema: Mapping[str, Any]) -> PlainText | None:
    """The values of a schema without references and unions."""
    named = schema.get("type", [*_TYPES])
    types = [named] if isinstance(named, str) else named
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(types, list) or not _is_count(least) or not _is_count(most or 0):
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return None if "const" in schema and "enum" in schema else _choices(values, types, schema)
    if "type" not in schema or not all(one in _TYPES for one in types):
        return None
    return PlainText((), ((least, most),) if "string" in types else (), "null" in types)


def _choices(values: Any, types: list[Any], schema: Mapping[str, Any]) -> PlainText | None:
    if not isinstance(values, list) or not all(one is None or type(one) is str for one in values):
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    texts = [one for one in values if one is not None and "string" in types]
    options = [one for one in texts if len(one) >= least and (most is None or len(one) <= most)]
    return PlainText(tuple(options), (), None in values and "null" in types)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
