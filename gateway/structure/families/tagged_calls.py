"""Calls whose arguments stand between tags, one by one, as the families of Qwen3-Coder and GLM.

Text is written as it is, all else as JSON. Arguments come in the order in which the schema lists
them, each at most once; none that it does not list, unless it lists none at all.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors.request_errors import RequestError, unsupported
from gateway.structure import json_schema
from gateway.structure.calls import ANY_TEXT, CallsInAnswer, Inner, without
from gateway.structure.keywords import NOTES, is_vendor, join
from gateway.structure.plain_text import ANY, PlainText, plain_text
from gateway.structure.references import DEFINITIONS, followed
from gateway.structure.structure import JsonSchema

MAX_KEY_CHARACTERS = 128
# What a schema of arguments may say of the object as a whole.
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_SPACE = r"[\s\x1c-\x1f\x85]*"  # what Python strips
_NULL = rf"{_SPACE}(null|None){_SPACE}"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The marks between which a family writes the parts of a call."""

    opening: str
    closing: str
    key_start: tuple[str, ...]
    value_start: tuple[str, ...]  # between an argument's name and its value
    value_end: str
    name_start: tuple[str, ...] = ()  # of the function
    name_end: tuple[str, ...] = ()
    call_end: tuple[str, ...] = ()
    has_line_breaks: bool = False  # around each value
    is_section: bool = False  # several calls may follow one opening
    ends_of_keys: str = "<>\n"  # characters that no argument's name can have
    begins_bare: bool = False

    def rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of the whole answer. Raises RequestError for what cannot be written."""
        rules = answer.opened_rules(inner)
        before, after = answer.sequence(self.name_start), answer.sequence(self.name_end)
        end = answer.sequence(self.call_end)
        calls = []
        for at, (name, schema) in enumerate(answer.named()):
            arguments = _Arguments(self, answer, inner, f"F{at}")
            calls.append(f"{before} {json.dumps(name)} {after} GAP? {arguments.of(schema)} {end}")
            rules += arguments.rules
        close = f"close: {answer.spelled(self.closing)}"
        call = f"call: {' | '.join(calls)}"
        more = "(GAP? call)*" if self.is_section and answer.is_parallel else ""
        return [*rules, f"group: GAP? call {more} GAP? close", call, close]


class _Arguments:
    """Writes the arguments of one function."""

    def __init__(
        self, writing: TaggedCalls, answer: CallsInAnswer, inner: Inner, name: str
    ) -> None:
        self.rules: list[str] = []
        self._writing, self._answer, self._inner, self._name = writing, answer, inner, name

    def of(self, schema: JsonSchema) -> str:
        """The rule for all arguments. Raises RequestError."""
        given = {} if schema.schema is True else schema.schema
        try:
            json_schema.check(given, schema.place, is_loose=schema.is_loose)
            given = followed(given)
            parts = [*self._properties(given, schema)]
            if parts or given.get("additionalProperties") is False:
                return " ".join(parts)
            return self._any_arguments(_other_text(given, schema.place))
        except RequestError:
            if not schema.is_loose:
                raise
            return self._any_arguments(ANY)

    def _properties(self, given: Mapping[str, Any], schema: JsonSchema) -> Iterator[str]:
        """The rules for each argument that the schema lists."""
        check_object(given, schema.place)
        properties, required = given.get("properties", {}), given.get("required", [])
        shared = {key: given[key] for key in DEFINITIONS if key in given}
        for name in dict.fromkeys([*properties, *required]):
            place = join(f"{schema.place}.properties", name)
            argument = f"{self._key(name, place)} {self._value(given, shared, name, schema)} GAP?"
            yield argument if name in required else f"({argument})?"

    def _key(self, name: str, place: str) -> str:
        """The text before an argument's value."""
        writing, answer = self._writing, self._answer
        spelled = name and name == name.strip() and not {*writing.ends_of_keys} & {*name}
        if not spelled or len(name) > MAX_KEY_CHARACTERS:
            raise unsupported(place, "has a name that this model's format of calls cannot write")
        before, after = answer.sequence(writing.key_start), answer.sequence(writing.value_start)
        line = r'"\n"' if writing.has_line_breaks else ""
        return f"{before} {json.dumps(name, ensure_ascii=False)} {after} {line}"

    def _value(
        self, root: Mapping[str, Any], shared: Mapping[str, Any], name: str, schema: JsonSchema
    ) -> str:
        """The rule for a value and its end."""
        place = join(f"{schema.place}.properties", name)
        properties = root.get("properties", {})
        if name not in properties:  # required and not described
            return self._text(_other_text(root, schema.place), place)
        part = properties[name]
        text = plain_text(part, root)
        if text is not None:
            return self._text(text, place)
        if isinstance(part, Mapping):
            part = dict(shared) | dict(part)
        value = JsonSchema(place, part, is_loose=schema.is_loose)
        return f"{self._inner.add(value)} {self._end()}"

    def _end(self) -> str:
        line = r'"\n" ' if self._writing.has_line_breaks else ""
        return f"{line}{self._answer.written(self._writing.value_end)}"

    def _text(self, text: PlainText, place: str) -> str:
        """The rule for plain text and its end; or null."""
        end = self._writing.value_end
        options = [one for one in text.options if end not in one]
        kinds = [json.dumps(one, ensure_ascii=False) for one in options]
        kinds += [
            f"/(.|\\n){{{least},{'' if most is None else most}}}/" for least, most in text.lengths
        ]
        if not kinds:
            raise unsupported(place, "has no value that this model's format of calls can write")
        name = f"{self._name}V{len(self.rules)}"
        limits = [without(end)]
        if text.allows_null:
            # What Python reads as JSON of another kind, or as JSON's own text, is none.
            limits += [f"~/{_NULL}/", f'~/{_SPACE}"{ANY_TEXT}/']
        self.rules.append(f"{name}T: ({' | '.join(kinds)}) & {' & '.join(limits)}")
        values = f'({name}T | "null")' if text.allows_null else f"{name}T"
        line = r'"\n"' if self._writing.has_line_breaks else ""
        token = self._answer.token_of(end)
        self.rules.append(f"{name}: {values} {line} {'' if token else json.dumps(end)}")
        return f"{name} {token}"

    def _any_arguments(self, text: PlainText) -> str:
        """Arguments of any name."""
        writing, answer = self._writing, self._answer
        name = f"{self._name}A{len(self.rules)}"
        ends = writing.ends_of_keys.replace("\n", "\\n")
        key = rf"/[^{ends}\s]([^{ends}]{{0,{MAX_KEY_CHARACTERS - 2}}}[^{ends}\s])?/"
        line = r'"\n"' if writing.has_line_breaks else ""
        before, after = answer.sequence(writing.key_start), answer.sequence(writing.value_start)
        value = self._text(text, "")
        self.rules += [
            f"{name}K: {key}",
            f"{name.lower()}: {before} {name}K {after} {line} {value}",
        ]
        return f"({name.lower()} GAP?)*"


def check_object(schema: Mapping[str, Any], place: str) -> None:
    """Raises RequestError for what cannot be told argument by argument."""
    for keyword, value in schema.items():
        if keyword in NOTES or keyword in DEFINITIONS or is_vendor(keyword):
            continue
        types = value if isinstance(value, list) else [value]
        if keyword not in _OF_OBJECTS or (keyword == "type" and "object" not in types):
            problem = "is not supported for calls in this model's format"
            raise unsupported(join(place, keyword), problem)


def _other_text(schema: Mapping[str, Any], place: str) -> PlainText:
    """The form of an argument that the schema does not list: text.

    Raises RequestError where the schema wants another form.
    """
    other = schema.get("additionalProperties", True)
    found = ANY if other is True or other == {} else plain_text(other, schema)
    if found is None or found.allows_null or found.lengths != ANY.lengths:
        problem = "is not supported for calls in this model's format"
        raise unsupported(f"{place}.additionalProperties", problem)
    return found
