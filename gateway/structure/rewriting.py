"""Writes schemas in the keywords that the grammar library knows. Pure.

`not`, `if`, `uniqueItems`, `dependentRequired` and others become unions, intersections, ranges and
patterns that allow the same values. What has no such form is refused by its name and place. Where a
schema is loose, because it only describes, such a keyword is left out instead.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gateway.errors.request_errors import RequestError, invalid, unsupported
from gateway.structure import keywords
from gateway.structure.exact.numbers import BOUNDS, is_number
from gateway.structure.keywords import join
from gateway.structure.negation import negate

MAX_PIECES = 50_000  # values in a rewritten schema
MAX_ROWS = 400  # lists of different items that are written out
_OUTSIDE_NULL = frozenset({"$defs", "definitions", "$id", "$anchor", "$schema"})
_COMBINING = frozenset(
    {"$ref", "anyOf", "oneOf", "allOf", "not", "if", "dependentSchemas", "dependencies"}
)
_SAFE_REFERENCE = re.compile("#|#/(\\$defs|definitions)/[^/]*|[^#/].*|#[^/].*")
_DROPPED = keywords.REWRITTEN_MAPS | keywords.REWRITTEN_SINGLE | keywords.REWRITTEN_VALUES


def rewrite(schema: Any, place: str, *, is_loose: bool = False) -> Any:
    """A checked schema without the keywords that the library does not know.

    Raises RequestError naming the keyword that has no other form, and for one that becomes too
    large.
    """
    rewriter = _Rewriter(schema if isinstance(schema, dict) else {}, place, is_loose)
    rewritten = rewriter.rewrite(schema, place)
    if rewriter.has_changed and rewriter.reference_inside is not None:
        problem = "leads into a schema that is written otherwise; let it lead to one of $defs"
        raise unsupported(rewriter.reference_inside, problem)
    return {} if rewritten is True else rewritten


@dataclass(slots=True)
class _Rewriter:
    root: dict[str, Any]
    root_place: str
    is_loose: bool
    num_pieces: int = 0
    has_changed: bool = False
    reference_inside: str | None = None  # the place of one that may lead to what has changed

    def rewrite(self, schema: Any, place: str) -> Any:
        """A schema of the same values, inside out."""
        if not isinstance(schema, dict):
            return schema
        parts = self._with_rewritten_parts(schema, place)
        rules: list[Any] = []
        for keyword, rule in _RULES.items():
            if keyword not in parts:
                continue
            try:
                rules += self._rules(rule, parts, join(place, keyword))
            except RequestError:
                if not self.is_loose:
                    raise
        is_nullable = parts.get("nullable") is True
        self.has_changed |= bool(rules) or is_nullable or parts.keys() != schema.keys()
        if not _SAFE_REFERENCE.fullmatch(str(parts.get("$ref", "#"))):
            self.reference_inside = join(place, "$ref")
        kept = {name: value for name, value in parts.items() if name not in _DROPPED}
        if rules:
            kept["allOf"] = [*kept.get("allOf", ()), *rules]
        return _with_null(kept) if is_nullable else kept

    def _with_rewritten_parts(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, value in schema.items():
            where = join(place, name)
            if name in keywords.ALL_MAPS or name == "dependencies":
                value = {key: self.rewrite(part, join(where, key)) for key, part in value.items()}
            elif name in keywords.LISTS or (name == "items" and isinstance(value, list)):
                value = [self.rewrite(part, f"{where}[{at}]") for at, part in enumerate(value)]
            elif name in keywords.ALL_SINGLE:
                value = self.rewrite(value, where)
            elif self.is_loose and not _is_held(name, value):
                continue
            parts[name] = value
        _modernize(parts, is_loose=self.is_loose)
        return parts

    def _rules(self, rule: Any, parts: dict[str, Any], place: str) -> list[Any]:
        try:
            found: list[Any] = rule(self, parts, place)
        except RecursionError as error:
            raise invalid(place, "is nested too deeply to be negated") from error
        self._count(found)
        return found

    def _count(self, value: Any) -> None:
        """Raises RequestError when all that was added is too much."""
        todo = [value]
        while todo:
            part = todo.pop()
            self.num_pieces += 1
            if self.num_pieces > MAX_PIECES:
                problem = f"becomes more than {MAX_PIECES} values without not, if and the like"
                raise invalid(self.root_place, problem)
            todo += part.values() if isinstance(part, dict) else []
            todo += part if isinstance(part, list) else []

    def not_(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`not`."""
        return [negate(parts["not"], place)]

    def if_(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`if` with `then` and `else`, which mean nothing without it."""
        then, other = parts.get("then", True), parts.get("else", True)
        if then in (True, {}) and other in (True, {}):
            return []
        condition = parts["if"]
        return [{"anyOf": [{"allOf": [condition, then]}, _both(negate(condition, place), other)]}]

    def dependent_required(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`dependentRequired`."""
        rules = []
        for name, needed in parts["dependentRequired"].items():
            if not isinstance(needed, list):
                raise invalid(join(place, name), "must be an array")
            rules.append(_unless_absent(name, {"required": [name, *needed]}))
        return rules

    def dependent_schemas(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`dependentSchemas`."""
        return [
            _unless_absent(name, {"allOf": [{"required": [name]}, part]})
            for name, part in parts["dependentSchemas"].items()
        ]

    def dependencies(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`dependencies` of older drafts, which hold names or a schema."""
        return [
            _unless_absent(name, {"required": [name, *part]})
            if isinstance(part, list)
            else _unless_absent(name, {"allOf": [{"required": [name]}, part]})
            for name, part in parts["dependencies"].items()
        ]

    def property_names(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`propertyNames` of an object without `properties`, or by a list of names."""
        rule = {
            name: value
            for name, value in _plain(parts["propertyNames"]).items()
            if (name, value) != ("type", "string")
        }
        if not rule:
            return []
        others = parts.get("additionalProperties", True)
        known = parts.get("properties", {})
        if set(rule) <= {"enum", "const"} and "patternProperties" not in parts:
            names = [name for name in _values(rule) or [] if isinstance(name, str)]
            kinds = {name: known.get(name, others) for name in names}
            gone = {name: False for name in known if name not in kinds}
            return [{"properties": kinds | gone, "additionalProperties": False}]
        if set(rule) == {"pattern"} and not known and "patternProperties" not in parts:
            pattern = {rule["pattern"]: others}
            return [{"patternProperties": pattern, "additionalProperties": False}]
        raise unsupported(place, "is supported with names or a pattern and without properties")

    def unevaluated(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`unevaluatedProperties` and `unevaluatedItems`, where nothing else can evaluate."""
        name = place.rpartition(".")[2]
        value = parts[name]
        if value in (True, {}):
            return []
        if _COMBINING & parts.keys():
            raise unsupported(place, "is not supported next to combined schemas")
        known = "additionalProperties" if name == "unevaluatedProperties" else "items"
        parts.setdefault(known, value)
        return []

    def unique_items(self, parts: dict[str, Any], place: str) -> list[Any]:
        """`uniqueItems` where the lists of different items are few."""
        most = parts.get("maxItems", math.inf)
        if parts["uniqueItems"] is not True or most <= 1:
            return []
        values = self._values_of(parts.get("items"))
        if values is None or "prefixItems" in parts:
            problem = "is supported for items of an enum, or with maxItems 1"
            raise unsupported(place, problem)
        rows = list(_rows(values, parts.get("minItems", 0), min(most, len(values))))
        if len(rows) > MAX_ROWS:
            problem = f"allows more than {MAX_ROWS} lists of different items; set maxItems"
            raise unsupported(place, problem)
        # The rows say everything about the items.
        for name in ("items", "minItems", "maxItems"):
            parts.pop(name, None)
        return [{"anyOf": [*map(_exactly, rows), {"type": _NO_ARRAY}]}]

    def _values_of(self, items: Any) -> list[Any] | None:
        """All values of a schema, if it lists them; a reference is followed once."""
        reference = items.get("$ref") if isinstance(items, dict) else None
        if isinstance(reference, str) and len(_plain(items)) == 1:
            _, _, path = reference.partition("#/")
            kind, _, name = path.partition("/")
            named = self.root.get(kind) if kind in ("$defs", "definitions") else None
            items = named.get(name) if isinstance(named, dict) else None
        return _values(_plain(items)) if isinstance(items, dict) else None


_RULES: dict[str, Any] = {
    "not": _Rewriter.not_,
    "if": _Rewriter.if_,
    "dependentRequired": _Rewriter.dependent_required,
    "dependentSchemas": _Rewriter.dependent_schemas,
    "dependencies": _Rewriter.dependencies,
    "propertyNames": _Rewriter.property_names,
    "unevaluatedProperties": _Rewriter.unevaluated,
    "unevaluatedItems": _Rewriter.unevaluated,
    "uniqueItems": _Rewriter.unique_items,
}
_NO_ARRAY = ["null", "boolean", "number", "string", "object"]


def _is_held(keyword: str, value: Any) -> bool:
    """True if a keyword of a loose schema can be held, as far as its name tells."""
    if keyword == "format":
        return isinstance(value, str) and value not in keywords.OTHER_FORMATS
    if keyword in BOUNDS | {"multipleOf"}:
        is_flag = isinstance(value, bool) and keyword.startswith("exclusive")
        return is_flag or (is_number(value) and (keyword in BOUNDS or value > 0))
    return keyword in keywords.KNOWN


def _modernize(parts: dict[str, Any], *, is_loose: bool) -> None:
    """Writes older drafts' forms in today's; drops formats that are annotations."""
    items = parts.get("items")
    if isinstance(items, list):
        parts["prefixItems"] = items
        parts["items"] = parts.get("additionalItems", True)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(parts.get(exclusive), bool):
            is_exclusive = parts.pop(exclusive)
            if is_exclusive and bound in parts:
                parts[exclusive] = parts.pop(bound)
    if is_custom_format(parts.get("format")):
        del parts["format"]
    if is_loose and "oneOf" in parts:  # the library refuses parts that overlap
        kinds = {"anyOf": parts.pop("oneOf")}
        parts["allOf"] = [*parts.get("allOf", ()), kinds]


def is_custom_format(value: Any) -> bool:
    """True if a format is none of the standard's, and so an annotation."""
    known = keywords.HELD_FORMATS | keywords.OTHER_FORMATS
    return isinstance(value, str) and value not in known


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema or null; definitions stay where references expect them."""
    outside = {name: value for name, value in schema.items() if name in _OUTSIDE_NULL}
    inside = {name: value for name, value in schema.items() if name not in _OUTSIDE_NULL}
    return outside | {"anyOf": [{"type": "null"}, inside]}


def _unless_absent(name: str, schema: Any) -> dict[str, Any]:
    return {"anyOf": [{"properties": {name: False}}, schema]}


def _both(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    return {"allOf": [first, second]}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema without its annotations."""
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    return {
        name: value
        for name, value in schema.items()
        if name not in keywords.NOTES and not keywords.is_vendor(name)
    }


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The different values of a schema that lists them and does little else; None for others."""
    if not schema.keys() <= {"enum", "const", "type"}:
        return None
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    kind = schema.get("type")
    if values is None and kind in ("boolean", "null"):
        values = [True, False] if kind == "boolean" else [None]
    if not isinstance(values, list):
        return None
    kinds = [kind] if isinstance(kind, str) else kind
    return [
        value
        for value in {_canonical(value): value for value in values}.values()
        if kinds is None or any(_is_of(value, name) for name in kinds)
    ]


def _canonical(value: Any) -> str:
    """The same text for equal values."""
    exact = json.loads(json.dumps(value), parse_float=_whole)
    return json.dumps(exact, sort_keys=True)


def _whole(text: str) -> int | float:
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else float(text)


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    found = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return any(found[known] == kind for known in found if isinstance(value, known))


def _rows(values: Sequence[Any], fewest: int, most: float) -> Iterator[Sequence[Any]]:
    """Lists of different values, one more than are allowed at most."""
    rows = itertools.chain.from_iterable(
        itertools.permutations(values, length) for length in range(fewest, int(most) + 1)
    )
    return itertools.islice(rows, MAX_ROWS + 1)


def _exactly(row: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "array",
        "prefixItems": [{"const": value} for value in row],
        "items": False,
        "minItems": len(row),
    }
