"""Values of arguments that a model writes as plain text, as JSON by their schemas' types. Pure.

A parameter's schema is searched for through the references and combinations at the top of the
function's schema.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.structure.plain_text import plain_text
from gateway.structure.references import resolve
from gateway.text.unicode import to_json

MAX_NESTING = 8  # of references and combinations
MAX_VISITS = 512  # of parts of one schema, which may name each other
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
_CONDITIONAL = ("then", "else")
_TYPE_OF = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
_SPELLED = {"True": "true", "False": "false", "None": "null"}  # as in Python

Schema = Mapping[str, Any]
Types = frozenset[str] | None  # None: any, as far as is known


def is_known(parameters: Schema, name: str) -> bool:
    """True if the function's schema lists a parameter."""
    return next(_Search(parameters).listed(name), None) is not None


def is_text(parameters: Schema, name: str) -> bool:
    """True if a parameter can be nothing but text, so that it can be passed on as it comes."""
    for schema in _schemas_of(parameters, name):
        found = plain_text(schema, parameters)
        if found is None or found.allows_null:
            return False
    return True


def as_json(text: str, parameters: Schema, name: str) -> str:
    """The JSON of a value; a string where it is no JSON of a type that the schema allows."""
    types = _Search(parameters).union(_schemas_of(parameters, name), 0)
    spelled = text.strip()
    spelled = _SPELLED.get(spelled, spelled)
    try:
        value = json.loads(spelled, parse_constant=_refuse, strict=False)  # line breaks in text
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is not None and "string" in types and _type_of(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    try:
        return to_json(value, allow_nan=False)
    except ValueError:  # a number that Python reads as infinite
        return spelled


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _type_of(value: Any) -> str:
    return _TYPE_OF.get(type(value), "null" if value is None else "object")


def _schemas_of(parameters: Schema, name: str) -> list[Any]:
    """The schemas of a parameter; of one that is not listed, that of others, if there is one."""
    listed = list(_Search(parameters).listed(name))
    return listed or list(_Search(parameters).others())


class _Search:
    """A search through the parts of one schema, which ends after so many of them."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = MAX_VISITS

    def listed(self, name: str) -> Iterator[Any]:
        """The schemas that a function's schema gives a parameter."""
        for part in self._objects(self._root, 0):
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                yield properties[name]

    def others(self) -> Iterator[Any]:
        """The schemas of parameters that it does not list."""
        for part in self._objects(self._root, 0):
            other = part.get("additionalProperties")
            if isinstance(other, Mapping) and other:
                yield other

    def _objects(self, schema: Any, depth: int) -> Iterator[Schema]:
        """A schema and those that it is combined of."""
        if not self._may_visit(schema, depth):
            return
        yield schema
        for key in _COMBINATIONS:
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) else []:
                yield from self._objects(part, depth + 1)
        for key in _CONDITIONAL:
            yield from self._objects(schema.get(key), depth + 1)
        if "$ref" in schema:
            yield from self._objects(resolve(schema["$ref"], self._root), depth + 1)

    def _may_visit(self, schema: Any, depth: int) -> bool:
        self._num_left -= 1
        return isinstance(schema, Mapping) and depth <= MAX_NESTING and self._num_left > 0

    def union(self, schemas: list[Any], depth: int) -> Types:
        """The types that any of some schemas allows."""
        found = [self._types(schema, depth) for schema in schemas]
        known = [types for types in found if types is not None]
        return frozenset().union(*known) if known and len(known) == len(found) else None

    def _types(self, schema: Any, depth: int) -> Types:
        """The types that one schema allows."""
        if not self._may_visit(schema, depth):
            return None
        said = [_named_types(schema), _listed_types(schema)]
        if "$ref" in schema:
            said.append(self._types(resolve(schema["$ref"], self._root), depth + 1))
        for key in _COMBINATIONS:
            parts = schema.get(key)
            if not isinstance(parts, list):
                continue
            if key == "allOf":
                said += [self._types(part, depth + 1) for part in parts]
            else:
                said.append(self.union(parts, depth + 1))
        known = [types for types in said if types is not None]
        return frozenset.intersection(*known) or None if known else None


def _named_types(schema: Schema) -> Types:
    named = schema.get("type")
    if named is None:
        return None
    names = named if isinstance(named, list) else [named]
    known = {name for name in names if isinstance(name, str)}
    if schema.get("nullable") is True:
        known.add("null")
    return frozenset("number" if name == "integer" else name for name in known)


def _listed_types(schema: Schema) -> Types:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_type_of, values)) if isinstance(values, list) else None
