"""Values of arguments that a model writes as plain text, as JSON by their schemas' types. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.structure.plain_text import plain_text
from gateway.text.unicode import to_json

_TYPE_OF = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
_SPELLED = {"True": "true", "False": "false", "None": "null"}  # as in Python


def is_text(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter can be nothing but text, so that it can be passed on as it comes."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return True
    found = plain_text(properties[name], parameters)
    return found is not None and not found.allows_null


def as_json(text: str, parameters: Mapping[str, Any], name: str) -> str:
    """The JSON of a value; a string where it is no JSON of a type that the schema allows."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(schema, parameters)
    spelled = text.strip()
    spelled = _SPELLED.get(spelled, spelled)
    try:
        value = json.loads(spelled, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    found = _TYPE_OF.get(type(value), "null" if value is None else "object")
    if "string" in types and found not in types:
        return json.dumps(text, ensure_ascii=False)
    try:
        return to_json(value, allow_nan=False)
    except ValueError:  # a number that Python reads as infinite
        return spelled


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a schema allows; empty if they are not known."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        known = [name for name in names if isinstance(name, str)]
        if schema.get("nullable") is True:
            known.append("null")
        return frozenset("number" if name == "integer" else name for name in known)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = [_TYPE_OF.get(type(one), "null" if one is None else "object") for one in values]
        return frozenset(found)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        kind, _, name = reference.removeprefix("#/").partition("/")
        definitions = root.get(kind)
        part = definitions.get(name) if isinstance(definitions, Mapping) else None
        return _types(part, root, depth + 1)
    kinds = schema.get("anyOf") or schema.get("oneOf")
    parts = kinds if isinstance(kinds, list) else []
    found_in = [_types(part, root, depth + 1) for part in parts]
    return frozenset().union(*found_in) if all(found_in) else frozenset()
