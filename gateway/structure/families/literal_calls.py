"""Calls whose arguments are literals, one by one, as the families of LFM2 and Gemma 4.

A text is written in the family's own quotes, or as JSON, as all else is: their parsers read both.
Arguments come in the order in which the schema lists them, each at most once; none that it does not
list, unless it lists none at all.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.errors.request_errors import RequestError, unsupported
from gateway.structure import json_schema
from gateway.structure.calls import PLAIN_NAME, CallsInAnswer, Inner, without
from gateway.structure.families.tagged_calls import check_object
from gateway.structure.keywords import join
from gateway.structure.plain_text import ANY, PlainText, plain_text
from gateway.structure.references import DEFINITIONS, followed
from gateway.structure.structure import JsonSchema


@dataclass(frozen=True, slots=True)
class LiteralCalls:
    """The words around the parts of a family's calls."""

    opening: str
    closing: str
    name_start: str
    name_end: str  # before the arguments
    call_end: str
    separator: str  # between an argument's name and its value
    comma: str
    quote: str  # before and after a text
    no_text: str  # characters that a text in these quotes cannot have
    brackets: tuple[str, str] = ("", "")  # around several calls, with commas between them
    begins_bare: bool = False

    def rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of the whole answer. Raises RequestError for what cannot be written."""
        rules, calls = answer.opened_rules(inner), []
        for at, (name, schema) in enumerate(answer.named()):
            arguments = _Arguments(self, answer, inner, f"f{at}")
            head = json.dumps(f"{self.name_start}{name}{self.name_end}")
            calls.append(f"{head} {arguments.of(schema)} {json.dumps(self.call_end)}")
            rules += arguments.rules
        first, last = map(json.dumps, self.brackets)
        is_list = all(self.brackets) and answer.is_parallel
        more = '("," " "? call)*' if is_list else ""
        return [
            *rules,
            f"group: GAP? {first} call {more} {last} GAP? close",
            f"call: {' | '.join(calls)}",
            f"close: {answer.spelled(self.closing)}",
        ]


class _Arguments:
    """Writes the arguments of one function."""

    def __init__(
        self, writing: LiteralCalls, answer: CallsInAnswer, inner: Inner, name: str
    ) -> None:
        self.rules: list[str] = []
        self._writing, self._answer, self._inner, self._name = writing, answer, inner, name

    def of(self, schema: JsonSchema) -> str:
        """Returns the pattern of all arguments. Raises RequestError."""
        given = {} if schema.schema is True else schema.schema
        try:
            json_schema.check(given, schema.place, is_loose=schema.is_loose)
            given = followed(given)
            check_object(given, schema.place)
            other = given.get("additionalProperties", True)
            members = [*self._properties(given, schema)]
            if members or other is False:
                return self._in_order(members)
            if other not in (True, {}):
                problem = "is not supported for calls in this model's format"
                raise unsupported(f"{schema.place}.additionalProperties", problem)
        except RequestError:
            if not schema.is_loose:
                raise
        return self._any(schema)

    def _properties(
        self, given: Mapping[str, Any], schema: JsonSchema
    ) -> Iterator[tuple[str, bool]]:
        """Yields the pattern of each argument in the schema, and whether it must be there."""
        properties, required = given.get("properties", {}), given.get("required", [])
        shared = {key: given[key] for key in DEFINITIONS if key in given}
        for name in dict.fromkeys([*properties, *required]):
            place = join(f"{schema.place}.properties", name)
            if not PLAIN_NAME.fullmatch(name):
                raise unsupported(
                    place, "has a name that this model's format of calls cannot write"
                )
            part = properties.get(name, True)
            text = plain_text(part, given) if name in properties else ANY
            if isinstance(part, Mapping):
                part = shared | dict(part)
            value = self._value(replace(schema, place=place, schema=part), text)
            yield f"{json.dumps(name + self._writing.separator)} {value}", name in required

    def _in_order(self, members: list[tuple[str, bool]]) -> str:
        """The name of a rule for some arguments, with commas between those that are there."""
        comma = json.dumps(self._writing.comma)
        name = f"{self._name}m"
        for at, (member, is_required) in enumerate(members):
            after = f"{name}n{at + 1}"
            skipped = [] if is_required else [f"{name}{at + 1}"]
            self.rules.append(f"{name}{at}: {' | '.join([f'{member} {after}', *skipped])}")
            skipped = [] if is_required else [after]
            kinds = " | ".join([f"{comma} {member} {after}", *skipped])
            self.rules.append(f"{name}n{at}: {kinds}")
        self.rules += [f'{name}{len(members)}: ""', f'{name}n{len(members)}: ""']
        return f"{name}0"

    def _any(self, schema: JsonSchema) -> str:
        """Arguments of any name."""
        name = self._name
        value = self._value(replace(schema, schema=True), ANY)
        self.rules += [
            f"{name.upper()}K: /[A-Za-z_][A-Za-z0-9_]{{0,127}}/",
            f"{name}a: {name.upper()}K {json.dumps(self._writing.separator)} {value}",
        ]
        return f"({name}a ({json.dumps(self._writing.comma)} {name}a)*)?"

    def _value(self, schema: JsonSchema, text: PlainText | None) -> str:
        """Returns the pattern of a value: JSON, or a text in the family's quotes."""
        any_json = self._inner.add(schema)
        native = None if text is None else self._text(text)
        return any_json if native is None else f"({any_json} | {native})"

    def _text(self, text: PlainText) -> str | None:
        """Returns the pattern of a text in quotes; None if it has no value that they can hold."""
        quote, no_text = self._writing.quote, self._writing.no_text
        options = [one for one in text.options if quote not in one and not {*no_text} & {*one}]
        kinds = [json.dumps(one, ensure_ascii=False) for one in options]
        kinds += [
            f"/(.|\\n){{{least},{'' if most is None else most}}}/" for least, most in text.lengths
        ]
        if not kinds:
            return None
        name = f"{self._name.upper()}T{len(self.rules)}"
        limits = [without(one) for one in (quote, *no_text)]
        self.rules.append(f"{name}T: ({' | '.join(kinds)}) & {' & '.join(limits)}")
        token = self._answer.token_of(quote)
        begin = token or json.dumps(quote)
        self.rules.append(f"{name}: {name}T {'' if token else json.dumps(quote)}")
        return f"{begin} {name} {token}"
