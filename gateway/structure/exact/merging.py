"""Schemas without `allOf`, `anyOf` and references at their top: as alternatives of plain keywords.

Pure. What cannot be merged is told by an exception; the parts of an alternative may hold `allOf`.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from gateway.structure.exact.failures import NotWritten
from gateway.structure.exact.numbers import fraction, is_number, plain, range_of

Schema = dict[str, Any]

MAX_ALTERNATIVES = 1_024
MAX_EXCLUSIVE = 64  # that are compared, each with each of the others
MAX_DEPTH = 32
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OUTSIDE = frozenset({"$defs", "definitions", "$id", "$anchor"})
_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


class Merger:
    """Reads the schemas of one document."""

    def __init__(self, resolve: Callable[[str], Any], spend: Callable[[int], None]) -> None:
        self._resolve = resolve  # a reference's schema
        self._spend = spend  # counts work; raises NotWritten

    def alternatives(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Schemas without combinators that together allow the same. Raises NotWritten."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if depth > MAX_DEPTH:
            raise NotWritten("its references lead back to itself")
        own = plain(schema)
        groups = [self.alternatives(part, depth + 1) for part in own.pop("allOf", ())]
        if "$ref" in own:
            groups.append(self.alternatives(self._resolve(own.pop("$ref")), depth + 1))
        for name in ("anyOf", "oneOf"):
            kinds = [self.alternatives(part, depth + 1) for part in own.pop(name, ())]
            if name == "oneOf" and not _all_disjoint(kinds):
                raise NotWritten("its oneOf may overlap, or has many parts")
            if name in schema:
                groups.append([one for kind in kinds for one in kind])
        merged = [{name: value for name, value in own.items() if name not in _OUTSIDE}]
        for group in groups:
            self._spend(len(merged) * len(group))
            merged = [
                one
                for first, second in itertools.product(merged, group)
                if (one := merge(first, second)) is not None
            ]
            if len(merged) > MAX_ALTERNATIVES:
                raise NotWritten(f"it has more than {MAX_ALTERNATIVES} alternatives")
        return merged


def merge(first: Schema, second: Schema) -> Schema | None:
    """The schema of what both allow, without combinators at the top. Raises NotWritten.

    None: they have nothing in common.
    """
    if first.keys() & {"prefixItems"} or second.keys() & {"prefixItems"}:
        _refuse_both(first, second, {"prefixItems", "items"})
    if "patternProperties" in first or "patternProperties" in second:
        _refuse_both(first, second, {"properties", "patternProperties", "additionalProperties"})
    merged = first | second
    for name in first.keys() & second.keys():
        merged[name] = _both(name, first[name], second[name])
    _merge_values(merged, first, second)
    _merge_properties(merged, first, second)
    if merged.get("type") == []:
        return None
    return merged


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema without combinators allows; "number" includes "integer"."""
    given = schema.get("type", [name for name in TYPES if name != "integer"])
    names = {given} if isinstance(given, str) else set(given)
    return names - {"integer"} if "number" in names else names


def _refuse_both(first: Schema, second: Schema, names: set[str]) -> None:
    if first.keys() & names and second.keys() & names:
        raise NotWritten(f"it combines {' and '.join(sorted(names))} of several schemas")


def _both(name: str, first: Any, second: Any) -> Any:
    if first == second and type(first) is type(second):
        return first
    if name in _LARGER | _SMALLER and is_number(first) and is_number(second):
        return max(first, second) if name in _LARGER else min(first, second)
    if name == "type":
        return _common_types(first, second)
    if name == "required":
        return [*first, *(one for one in second if one not in first)]
    if name == "multipleOf":
        step = range_of({name: first}, is_integer=False).within(
            range_of({name: second}, is_integer=False)
        )
        return _as_number(step.step)
    if name in ("items", "additionalProperties"):
        return {"allOf": [first, second]}
    if name in ("properties", "enum", "const"):
        return first  # merged below
    raise NotWritten(f"it combines {name} of several schemas")


def _as_number(value: Fraction | None) -> float:
    assert value is not None
    if value.denominator == 1:
        return value.numerator
    if fraction(float(value)) != value:
        raise NotWritten("it combines several multipleOf")
    return float(value)


def _common_types(first: Any, second: Any) -> list[str]:
    one, other = types_of({"type": first}), types_of({"type": second})
    found = one & other
    if ("integer" in one and "number" in other) or ("number" in one and "integer" in other):
        found |= {"integer"}
    return sorted(found)


def _merge_values(merged: Schema, first: Schema, second: Schema) -> None:
    lists = [found for one in (first, second) if (found := values_of(one)) is not None]
    if len(lists) == 2:
        allowed = {_key(value) for value in lists[1]}
        merged["enum"] = [value for value in lists[0] if _key(value) in allowed]
        merged.pop("const", None)


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that `const` and `enum` of a schema leave; None: it has neither."""
    if "const" not in schema:
        return schema.get("enum")
    known = schema.get("enum", [schema["const"]])
    return [value for value in known if _key(value) == _key(schema["const"])]


def _key(value: Any) -> Hashable:
    """The same for equal JSON: true is not 1, and 1.0 is."""
    if isinstance(value, bool):
        return ("flag", value)
    if is_number(value):
        return ("number", value)
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("map", frozenset((name, _key(part)) for name, part in value.items()))
    return ("text or null", value)


def _merge_properties(merged: Schema, first: Schema, second: Schema) -> None:
    """Each property as both schemas say; one that a schema does not list is among its others."""
    if "properties" not in merged:
        return
    kinds: dict[str, Any] = {}
    named = (first.get("properties", {}), second.get("properties", {}))
    others = (first.get("additionalProperties", True), second.get("additionalProperties", True))
    for name in [*named[0], *(one for one in named[1] if one not in named[0])]:
        parts = [known.get(name, other) for known, other in zip(named, others, strict=True)]
        asked = [part for part in parts if part is not True]
        kinds[name] = {"allOf": asked} if len(asked) > 1 else asked[0] if asked else True
    merged["properties"] = kinds


def _all_disjoint(kinds: Sequence[Sequence[Schema]]) -> bool:
    return sum(map(len, kinds)) <= MAX_EXCLUSIVE and all(
        _are_disjoint(one, other)
        for first, second in itertools.combinations(kinds, 2)
        for one, other in itertools.product(first, second)
    )


def _kinds(schema: Schema) -> set[str]:
    """The types of what a schema allows: those of its values, where it lists them."""
    values, types = values_of(schema), types_of(schema)
    if values is None:
        return types
    numbers = {"number"} if "number" in types else types & {"integer"}
    kinds = [numbers if is_number(value) else {type_of(value)} & types for value in values]
    return set[str]().union(*kinds)


def type_of(value: Any) -> str:
    """The type of a value that is no number."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _are_disjoint(first: Schema, second: Schema) -> bool:
    """True if no value can fit both, as far as types, values, bounds and properties tell."""
    types = set(_common_types(sorted(_kinds(first)), sorted(_kinds(second))))
    if not types:
        return True
    values = values_of(first), values_of(second)
    if values[0] is not None and values[1] is not None:
        known = {_key(value) for value in values[1]}
        return not any(_key(value) in known for value in values[0])
    if types <= {"integer", "number"}:
        is_integer = types == {"integer"}
        one, other = (range_of(part, is_integer=is_integer) for part in (first, second))
        return one.within(other).is_empty()
    if types != {"object"}:
        return False
    shared = {*first.get("required", ())} & {*second.get("required", ())}
    properties = first.get("properties", {}), second.get("properties", {})
    return any(
        isinstance(one := properties[0].get(name), dict)
        and isinstance(other := properties[1].get(name), dict)
        and not {"$ref", "anyOf", "oneOf", "allOf"} & (one.keys() | other.keys())
        and _are_disjoint(one, other)
        for name in shared
    )
