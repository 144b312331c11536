"""Schemas of everything that another schema does not allow, in keywords that grammars know. Pure.

The negation of several keywords is the union of the negations of each. A schema is built of plain
values here; `place` names the part in errors.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.errors.request_errors import unsupported
from gateway.structure.exact.numbers import is_number
from gateway.structure.keywords import NOTES, is_vendor, join

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_EXCLUDED_CHARACTERS = 512  # of the texts that a value may not be
_ANY = r"(?s:.)"
# Keyword -> (type that it speaks of, keyword of the negation, difference of its number).
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_SILENT = NOTES | {"$defs", "definitions", "$id", "$anchor"}


def negate(schema: Any, place: str) -> Any:
    """The schema of all values that a schema does not allow; False if there are none.

    Raises RequestError naming the first keyword that cannot be negated.
    """
    if isinstance(schema, bool):
        return not schema
    kinds = [
        kind
        for keyword, value in schema.items()
        if keyword not in _SILENT and not is_vendor(keyword)
        for kind in _negations(keyword, value, join(place, keyword))
        if kind is not False
    ]
    return {"anyOf": kinds} if kinds else False


def _negations(keyword: str, value: Any, place: str) -> list[Any]:
    """The kinds of values that break one keyword."""
    if keyword in _BOUNDS and is_number(value):
        kind, opposite, step = _BOUNDS[keyword]
        if opposite in ("maxLength", "maxItems") and value + step < 0:
            return []
        return [{"type": kind, opposite: value + step if step else value}]
    rule = _RULES.get(keyword)
    if rule is None:
        raise unsupported(place, "cannot be negated: not supported here in a schema")
    return rule(value, place)


def _other_types(value: Any, place: str) -> list[Any]:
    names = {value} if isinstance(value, str) else set(value)
    if "integer" in names and "number" not in names:
        raise unsupported(place, '"integer" cannot be negated')
    others = [name for name in TYPES if name not in names]
    return [{"type": others}] if others else []


def _one_missing(names: Any, place: str) -> list[Any]:
    return [{"type": "object", "properties": {name: False}} for name in names]


def _one_wrong(properties: Any, place: str) -> list[Any]:
    wrong = {name: negate(part, join(place, name)) for name, part in properties.items()}
    return [
        {"type": "object", "required": [name], "properties": {name: part}}
        for name, part in wrong.items()
        if part is not False
    ]


def _all_wrong(schemas: Any, place: str) -> list[Any]:
    return [{"allOf": [negate(part, f"{place}[{at}]") for at, part in enumerate(schemas)]}]


def _any_wrong(schemas: Any, place: str) -> list[Any]:
    return [negate(part, f"{place}[{at}]") for at, part in enumerate(schemas)]


_RULES: dict[str, Callable[[Any, str], list[Any]]] = {
    "type": _other_types,
    "enum": lambda values, place: [other_than(values, place)],
    "const": lambda value, place: [other_than([value], place)],
    "required": _one_missing,
    "properties": _one_wrong,
    "anyOf": _all_wrong,
    "allOf": _any_wrong,
}


def other_than(values: Sequence[Any], place: str) -> dict[str, Any]:
    """The schema of all values but these. Raises RequestError naming `place`."""
    gone = {"null"} if any(value is None for value in values) else set()
    rules: list[Any] = []
    flags = {value for value in values if isinstance(value, bool)}
    if len(flags) == 1:
        others = [name for name in TYPES if name != "boolean"]
        rules.append({"anyOf": [{"type": others}, {"const": not flags.pop()}]})
    elif flags:
        gone.add("boolean")
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        rules.append({"pattern": f"^({'|'.join(_other_texts(texts, place))})$"})
    numbers = [value for value in values if is_number(value)]
    if numbers:
        rules.append({"anyOf": list(_gaps(numbers))})
    for value in values:
        if value in ([], {}):
            rules.append({"minItems": 1} if value == [] else {"minProperties": 1})
        elif isinstance(value, (list, dict)):
            told = json.dumps(value)[:64]
            raise unsupported(place, f"cannot be negated for the value {told}")
    return {"type": [name for name in TYPES if name not in gone], "allOf": rules}


def _gaps(numbers: Iterable[float]) -> Iterable[dict[str, float]]:
    """The ranges between some numbers."""
    ordered = sorted(set(numbers))
    yield {"exclusiveMaximum": ordered[0]}
    for low, high in itertools.pairwise(ordered):
        yield {"exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"exclusiveMinimum": ordered[-1]}


def _other_texts(texts: Iterable[str], place: str) -> Iterable[str]:
    """Regular expressions that together match every text but these."""
    words = set(texts)
    if sum(map(len, words)) > MAX_EXCLUDED_CHARACTERS:
        most = MAX_EXCLUDED_CHARACTERS
        raise unsupported(place, f"excludes texts of more than {most} characters together")
    next_characters: dict[str, set[str]] = {"": set()}
    for word in words:
        for end in range(len(word)):
            next_characters.setdefault(word[:end], set()).add(word[end])
        next_characters.setdefault(word, set())
    for start, characters in next_characters.items():
        spelled = "".join(map(_spelled, start))
        if start not in words:
            yield spelled
        others = f"[^{''.join(map(_spelled, sorted(characters)))}]" if characters else _ANY
        yield f"{spelled}{others}{_ANY}*"


def _spelled(character: str) -> str:
    is_plain = character.isalnum() and character.isascii()
    return character if is_plain else f"\\x{{{ord(character):x}}}"
