"""Writes a grammar for a schema with numbers that the grammar library would round.

Each part with such a number becomes rules; each other part stays a schema, which the library reads.
Members come in the order of `properties`, as they do where the library writes the whole.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.structure.exact.documents import SchemaDocument
from gateway.structure.exact.failures import NotWritten
from gateway.structure.exact.merging import Merger, Schema, type_of, types_of, values_of
from gateway.structure.exact.names import CHARACTERS, quoted, searched
from gateway.structure.exact.numbers import (
    BOUNDS,
    NumberRange,
    fraction,
    holds_value,
    is_number,
    range_of,
    rounded_keywords,
)
from gateway.structure.exact.patterns import one_of, patterns_of, text_of

MAX_RULES = 5_000
MAX_NESTING = 64
CHARACTERS_PER_STEP = 1_000
_NUMBER_KEYS = frozenset({*BOUNDS, "multipleOf"})
_ITEM_KEYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_MEMBER_KEYS = frozenset(
    {"properties", "additionalProperties", "patternProperties"}
    | {"required", "minProperties", "maxProperties"}
)
_OF_TYPE = {
    "number": _NUMBER_KEYS,
    "integer": _NUMBER_KEYS,
    "array": _ITEM_KEYS,
    "object": _MEMBER_KEYS,
}
_COMMA = 'w "," w'


def grammar_of(root: Any, options: Mapping[str, Any], blanks: str) -> str | None:
    """The grammar of a schema in Lark's notation; None: the schema allows nothing.

    `options` are the library's for its parts, `blanks` a regular expression of white space between
    the parts, or "". Raises NotWritten.
    """
    return _Writer(SchemaDocument(root), options, blanks).grammar()


class _Writer:
    """The rules of one grammar, as they come."""

    def __init__(self, document: SchemaDocument, options: Mapping[str, Any], blanks: str) -> None:
        self._document = document
        self._merger = Merger(document.resolve, document.spend)
        self._options = dict(options)
        self._blanks = blanks
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of a rule, by its body
        self._schemas: dict[str, str | None] = {}  # name by the schema's text
        self._open: set[str] = set()  # names of schemas that are being written
        self._reentered: set[str] = set()
        self._num_names = 0

    def grammar(self) -> str | None:
        """All rules."""
        start = self._schema(self._document.root)
        if start is None:
            return None
        blank = [f"W: /{self._blanks}/", "w: W?"] if self._blanks else ['w: ""']
        return "\n".join([f"start: {start}", *blank, *self._rules, ""])

    def _schema(self, schema: Any) -> str | None:
        """The rule of a schema; None: it allows nothing."""
        if schema is False:
            return None
        key = json.dumps(schema)
        self._document.spend(1 + len(key) // CHARACTERS_PER_STEP)
        if key not in self._schemas:
            self._schemas[key] = name = self._name("s")
            self._open.add(name)
            self._schemas[key] = self._written(name, schema)
            self._open.remove(name)
        elif self._schemas[key] in self._open:
            self._reentered.add(str(self._schemas[key]))
        return self._schemas[key]

    def _written(self, name: str, schema: Any) -> str | None:
        if not self._document.needs_exactness(schema):
            return self._json(schema)
        if len(self._open) > MAX_NESTING:
            raise NotWritten(f"it is nested deeper than {MAX_NESTING} schemas")
        options = [
            option for one in self._merger.alternatives(schema) for option in self._alternative(one)
        ]
        if options:
            self._rules.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
            return name
        if name in self._reentered:
            raise NotWritten("its references lead back to itself")
        return None

    def _alternative(self, schema: Schema) -> list[str]:
        """Each kind of values that a schema without combinators allows."""
        values = values_of(schema)
        if values is not None:
            return self._values(schema, values)
        options, others = list[str](), list[str]()
        for kind in sorted(types_of(schema)):
            own = _OF_TYPE.get(kind, frozenset())
            part = {name: value for name, value in schema.items() if name in own}
            if kind in ("number", "integer"):
                if any(rounded_keywords(part, combines=False)):
                    options += self._number(range_of(part, is_integer=kind == "integer"))
                else:
                    others.append(kind)
            elif not self._document.needs_exactness(part):
                others.append(kind)
            else:
                body = self._array(part) if kind == "array" else self._object(part)
                options += [] if body is None else [body]
        return options + ([self._json(_only(schema, others))] if others else [])

    def _values(self, schema: Schema, values: Sequence[Any]) -> list[str]:
        """The values of an `enum` that the rest of its schema allows."""
        kinds = sorted(types_of(schema))
        rest = {name: value for name, value in schema.items() if name not in ("enum", "const")}
        others = [value for value in values if not is_number(value) and type_of(value) in kinds]
        held = [value for value in others if holds_value(value)]
        options = [self._json(self._held(rest, kinds) | {"enum": held})] if held else []
        for value in others:
            if holds_value(value):
                continue
            if rest.keys() & _OF_TYPE[type_of(value)]:
                raise NotWritten("it has both values and rules for what is in them")
            options.append(self._literal(value))
        numbers = [fraction(value) for value in values if is_number(value)]
        if "number" in kinds or "integer" in kinds:
            allowed = range_of(rest, is_integer="number" not in kinds)
            numbers = [number for number in numbers if allowed.holds(number)]
            options += [self._rule("N", f"/{one_of(numbers)}/")] if numbers else []
        return options

    def _held(self, schema: Schema, kinds: Sequence[str]) -> Schema:
        """The part of a schema that does not speak of numbers."""
        part = {name: one for name, one in schema.items() if name not in _NUMBER_KEYS}
        if self._document.needs_exactness(part):
            raise NotWritten("it has both values and rules for what is in them")
        return _only(part, kinds)

    def _number(self, numbers: NumberRange) -> list[str]:
        if numbers.is_empty():
            return []
        patterns = patterns_of(numbers)
        return [self._rule("N", " & ".join(f"/{pattern}/" for pattern in patterns))]

    def _literal(self, value: Any) -> str:
        """One value, with blanks between its parts."""
        if is_number(value):
            return json.dumps(text_of(fraction(value)))
        if isinstance(value, list):
            return _enclosed("[", [self._literal(part) for part in value], "]")
        if isinstance(value, dict):
            members = [f"{_key(name)} {self._literal(part)}" for name, part in value.items()]
            return _enclosed("{", members, "}")
        return quoted(value)

    def _array(self, schema: Schema) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        firsts, rest = self._items(schema, most)
        if (rest is None and least > len(firsts)) or (most is not None and least > most):
            return None
        return _enclosed("[", [self._listed(firsts, rest, least, most)], "]")

    def _items(self, schema: Schema, most: int | None) -> tuple[list[str], str | None]:
        """The first items, which have schemas of their own, and those after them."""
        firsts: list[str] = []
        for part in schema.get("prefixItems", ())[:most]:
            first = self._schema(part)
            if first is None:
                return firsts, None
            firsts.append(first)
        is_full = most is not None and most <= len(firsts)
        return firsts, None if is_full else self._schema(schema.get("items", True))

    def _listed(self, firsts: Sequence[str], rest: str | None, least: int, most: int | None) -> str:
        """Items with commas between them; after those that must come each may be the last."""
        tail = ""
        if rest is not None:
            num_before = max(len(firsts), 1)  # without first items one of the rest leads
            few = max(least - num_before, 0)
            many = None if most is None else most - num_before
            tail = _repeated(f"{_COMMA} {rest}", few, many)
        leading = [*firsts] or [rest for rest in [rest] if rest is not None]
        for at in reversed(range(len(leading))):
            comma = _COMMA if at else ""
            name = self._rule("i", f"{comma} {leading[at]} {tail}")
            tail = name if at < least else f"{name}?"
        return tail

    def _object(self, schema: Schema) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        _check_counts(schema)
        if "patternProperties" in schema:
            return self._matched(schema)
        other = schema.get("additionalProperties", True)
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            value = self._schema(properties.get(name, other))
            if value is None and name in required:
                return None
            if value is not None:
                members.append((f"{_key(name)} {value}", name in required))
        value = self._schema(other)
        if value is not None:
            taken = " | ".join(quoted(name) for name in dict.fromkeys([*properties, *required]))
            key = f'/"{CHARACTERS}"/' + (f" & ~{self._rule('K', taken)}" if taken else "")
            members.append((self._many(self._rule("K", key), value), False))
        return _enclosed("{", [self._sequence(members)], "}")

    def _matched(self, schema: Schema) -> str:
        """An object whose names match one pattern, or do not."""
        patterns = schema["patternProperties"]
        if schema.get("properties") or schema.get("required") or len(patterns) != 1:
            raise NotWritten("it has patternProperties besides others")
        ((pattern, part),) = patterns.items()
        matching, any_name = self._rule("K", searched(pattern)), r'/"[^"\\\x00-\x1F\x7F]*"/'
        other = schema.get("additionalProperties", True)
        members = [
            (self._many(self._rule("K", f"{any_name} & {kind}"), value), False)
            for kind, value in (
                (matching, self._schema(part)),
                (f"~{matching}", self._schema(other)),
            )
            if value is not None
        ]
        return _enclosed("{", [self._sequence(members)], "}")

    def _sequence(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in their order, with commas between; some may be left out."""
        required = [at for at, (_, is_required) in enumerate(members) if is_required]
        lead = required[0] if required else len(members) - 1
        # After a member that must come the others need no rules of their own.
        after = " ".join(
            f"{_COMMA} {member}" if is_required else f"({_COMMA} {member})?"
            for member, is_required in members[lead + 1 :]
        )
        begun = ""
        for member, is_required in reversed(members[: lead + 1]):
            one = self._rule("m", f"{member} {after}")
            if is_required:
                begun, after = one, f"{_COMMA} {member} {after}"
            else:
                begun = self._rule("m", f"{one} | {begun}") if begun else f"{one}?"
                after = f"({_COMMA} {member})? {after}"
            after = self._rule("n", after)
        return begun

    def _many(self, key: str, value: str) -> str:
        """One member or more."""
        member = self._rule("e", f'{key} w ":" w {value}')
        return self._rule("e", f"{member} ({_COMMA} {member})*")

    def _json(self, schema: Any) -> str:
        """A schema that the library reads."""
        closed = self._document.closed(schema)
        closed = {} if closed is True else closed
        text = json.dumps(closed | {"x-guidance": self._options}, ensure_ascii=False)
        return self._rule("j", f"%json {text}")

    def _rule(self, letter: str, body: str) -> str:
        if body not in self._names:
            self._names[body] = name = self._name(letter)
            self._rules.append(f"{name}: {body}")
        return self._names[body]

    def _name(self, letter: str) -> str:
        self._num_names += 1
        if self._num_names > MAX_RULES:
            raise NotWritten(f"it becomes more than {MAX_RULES} rules")
        return f"{letter}{self._num_names}"


def _only(schema: Schema, kinds: Sequence[str]) -> Schema:
    """A schema for values of some types alone."""
    dropped = frozenset[str]().union(*(own for kind, own in _OF_TYPE.items() if kind not in kinds))
    dropped -= frozenset[str]().union(*(_OF_TYPE.get(kind, frozenset()) for kind in kinds))
    return {name: one for name, one in schema.items() if name not in dropped} | {"type": [*kinds]}


def _check_counts(schema: Schema) -> None:
    """Raises NotWritten for numbers of members that the rules would not hold."""
    required = len(schema.get("required", ()))
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not isinstance(least, int) or least > required:
        raise NotWritten("it counts its members")
    if most is None:
        return
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if not isinstance(most, int) or not is_closed or len(schema.get("properties", ())) > most:
        raise NotWritten("it counts its members")


def _repeated(item: str, few: int, many: int | None) -> str:
    if many is None:
        return f"({item}){{{few},}}" if few else f"({item})*"
    return f"({item}){{{few},{many}}}" if many > 0 else ""


def _key(name: str) -> str:
    return f'{quoted(name)} w ":" w'


def _enclosed(opening: str, parts: Sequence[str], closing: str) -> str:
    inner = f" {_COMMA} ".join(part for part in parts if part)
    return f'"{opening}" w {inner} w "{closing}"' if inner else f'"{opening}" w "{closing}"'
