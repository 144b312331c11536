"""Grammars and schemas that hurt a process which reads them without limits."""

from typing import Any

Schema = dict[str, Any]


def chained_definitions(number: int) -> Schema:
    """A schema of so many definitions, each a property of the one before."""
    parts: Schema = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(number)
    }
    parts[f"d{number}"] = {"type": "string"}
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def chained_references(number: int) -> Schema:
    """A schema of so many definitions, each a reference to the next."""
    parts: Schema = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(number)}
    parts[f"d{number}"] = {"type": "string"}
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def chained_rules(number: int) -> str:
    """A grammar in Lark's notation of so many rules, each with the next at its end."""
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(number))
    return f'start: r0\n{rules}\nr{number}: "b"\n'


def many_properties(number: int) -> Schema:
    """A schema of an object with so many properties, none of them required."""
    return {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(number)}}


def many_required(number: int) -> Schema:
    """The same with all of them required, which can be followed."""
    schema = many_properties(number)
    return schema | {"required": list(schema["properties"]), "additionalProperties": False}


def nested(depth: int) -> Schema:
    """A value nested so deep, as a default, a const or an enum may be."""
    value: Schema = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def crossed(name: str, number: int = 16) -> Schema:
    """A small schema whose every pair of alternatives is intersected: tenths of a second of CPU."""
    integer = {"type": "integer"}
    unions: list[Schema] = [
        {"anyOf": [{"properties": {f"{name}{side}{i}": integer}} for i in range(number)]}
        for side in "ab"
    ]
    return {"allOf": unions}
