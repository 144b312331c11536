"""Structural tags: free text in which some openings begin something that has a form.

Two notations are read: `structures` with `triggers`, and the newer `format`. Both become rules of
one grammar; each schema, pattern or grammar inside becomes a grammar of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.structure.exact.numbers import read_number
from gateway.structure.structure import ContextFree, JsonSchema, Regex, Structure
from gateway.structure.writing import named_grammar, pattern_of

MAX_PARTS = 256
MAX_NESTING = 16
MAX_TEXT_BYTES = 4096  # of one opening, end or trigger
_ANY = r"(.|\n)*"


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Text with tags, as a request describes it."""

    place: str
    description: Mapping[str, Any]  # of type structural_tag
    token_ids: Mapping[str, int] = field(default_factory=dict)  # of markers that are tokens
    text_ids: tuple[int, ...] = ()  # of tokens in free text that no text spells

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError naming the part at fault."""
        writer = _Writer(self.token_ids, self.text_ids)
        form, place = self._form()
        start = writer.part(form, place, 0)
        rules = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])
        named = [
            named_grammar(f"g{index}", part.to_grammar())
            for index, part in enumerate(writer.structures)
        ]
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": rules}, *named]})

    def parts(self) -> list[Structure]:
        """The schemas, patterns and grammars inside, once it is known to have a grammar."""
        writer = _Writer(self.token_ids, self.text_ids)
        form, place = self._form()
        writer.part(form, place, 0)
        return writer.structures

    def _form(self) -> tuple[Mapping[str, Any], str]:
        """The newer notation, and its place."""
        form, structures = self.description.get("format"), self.description.get("structures")
        if form is not None and structures is not None:
            raise invalid(f"{self.place}.structures", "contradicts format; send one of them")
        if structures is None:
            return _object(form, f"{self.place}.format"), f"{self.place}.format"
        tags = [
            {"begin": one.get("begin"), "end": one.get("end"), "content": _schema_of(one)}
            for at, part in enumerate(_list(structures, f"{self.place}.structures"))
            for one in [_object(part, f"{self.place}.structures[{at}]")]
        ]
        triggers = self.description.get("triggers")
        return {"type": "triggered_tags", "tags": tags, "triggers": triggers}, self.place


Asked = Structure | StructuralTags  # what a request may require of its output


def _schema_of(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": structure.get("schema", {})}


class _Writer:
    """Writes parts as rules."""

    def __init__(self, token_ids: Mapping[str, int], text_ids: Sequence[int]) -> None:
        self.rules: list[str] = []
        self.structures: list[Structure] = []
        self._token_ids = token_ids
        self._text_ids = text_ids
        self._num_parts = 0

    def part(self, form: Any, place: str, depth: int) -> str:
        """The rule for a part. Raises RequestError."""
        form = _object(form, place)
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or depth > MAX_NESTING:
            most = f"at most {MAX_PARTS} parts, {MAX_NESTING} within each other, are allowed"
            raise invalid(place, most)
        kind = form.get("type")
        match kind:
            case "const_string":
                return self._text(form.get("value"), f"{place}.value")
            case "json_schema":
                schema_place = f"{place}.json_schema"
                return self._inner(JsonSchema(schema_place, form.get("json_schema", {})))
            case "regex":
                pattern = _string(form.get("pattern"), f"{place}.pattern")
                return self._inner(Regex(f"{place}.pattern", pattern))
            case "grammar":
                grammar = _string(form.get("grammar"), f"{place}.grammar")
                return self._inner(ContextFree(f"{place}.grammar", grammar))
            case "sequence" | "or":
                return self._rule(self._elements(form, place, depth))
            case "tag":
                return self._tag(form, place, depth, "")
            case "triggered_tags":
                return self._triggered(form, place, depth)
            case "tags_with_separator":
                return self._separated(form, place, depth)
            case "any_text":
                return self._rule(f"/{_ANY}/")
            case _:
                told = json.dumps(kind)[:64]
                raise unsupported(f"{place}.type", f"{told} is not supported here")

    def _elements(self, form: Mapping[str, Any], place: str, depth: int) -> str:
        elements = _list(form.get("elements"), f"{place}.elements")
        places = [f"{place}.elements[{at}]" for at in range(len(elements))]
        parts = [
            self.part(one, where, depth + 1) for one, where in zip(elements, places, strict=True)
        ]
        if form["type"] == "or":
            return " | ".join(parts)
        for one, where in zip(elements[:-1], places, strict=False):
            _refuse_free(one, where)
        return " ".join(parts)

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _inner(self, structure: Structure) -> str:
        self.structures.append(structure)
        return f"@g{len(self.structures) - 1}"

    def _text(self, text: Any, place: str) -> str:
        """A text; markers in it may come as tokens of their own."""
        pieces = [
            json.dumps(piece, ensure_ascii=False)
            if piece not in self._token_ids
            else f"({json.dumps(piece)} | <[{self._token_ids[piece]}]>)"
            for piece in self._pieces(_string(text, place))
        ]
        return " ".join(pieces) or '""'

    def _pieces(self, text: str) -> list[str]:
        """The text cut at its markers."""
        at, plain, pieces = 0, "", list[str]()
        while at < len(text):
            found = [word for word in self._token_ids if word and text.startswith(word, at)]
            if not found:
                plain, at = plain + text[at], at + 1
                continue
            marker = max(found, key=len)
            pieces += [plain, marker]
            plain, at = "", at + len(marker)
        return [piece for piece in [*pieces, plain] if piece]

    def _tag(self, form: Mapping[str, Any], place: str, depth: int, begun: str) -> str:
        """A tag of which the text `begun` has come already."""
        begin = _string(form.get("begin"), f"{place}.begin")[len(begun) :]
        end, content = form.get("end"), form.get("content")
        opening = self._text(begin, f"{place}.begin") if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text":
            return self._rule(f"{opening} {self._text_until(end, f'{place}.end')}")
        inner = self.part(content, f"{place}.content", depth + 1)
        if end:
            _refuse_free(_object(content, place), f"{place}.content")
        closing = self._text(end, f"{place}.end") if end else ""
        return self._rule(f"{opening} {inner} {closing}")

    def _text_until(self, end: Any, place: str) -> str:
        """Any text up to an end, which is a part of it."""
        end = _string(end, place)
        if not end:
            raise unsupported(place, "is needed after any_text")
        number = self._token_ids.get(end)
        lazy, text = f"u{len(self.rules)}", f"/{_ANY}{pattern_of(end)}/"
        self.rules.append(f"{lazy}[lazy]: {text}")
        if number is None:
            return lazy
        return f"({lazy} | /{_ANY}/ <[{number}]>)"

    def _triggered(self, form: Mapping[str, Any], place: str, depth: int) -> str:
        """Free text in which each trigger begins one of the tags."""
        triggers = [
            _string(trigger, f"{place}.triggers[{at}]")
            for at, trigger in enumerate(_list(form.get("triggers"), f"{place}.triggers"))
        ]
        groups = dict.fromkeys(triggers, "")
        tags = _list(form.get("tags"), f"{place}.{'tags' if 'type' in form else 'structures'}")
        for trigger in groups:
            kinds = self._triggered_by(trigger, triggers, tags, place, depth)
            number = self._token_ids.get(trigger)
            head = self._spelled_after_text(trigger, number)
            groups[trigger] = f"{head} ({' | '.join(kinds)})"
        unbegun = " & ".join(
            [f"/{_ANY}/", *(f"~/{_ANY}{pattern_of(one)}{_ANY}/" for one in groups)]
        )
        rest = f"REST{len(self.rules)}"
        one = self._rule(" | ".join(groups.values()))
        self.rules.append(f"{rest}: {unbegun}")
        others = sorted({*self._text_ids} - {self._token_ids.get(one) for one in groups})
        before = f"(/{_ANY}/ <[{','.join(map(str, others))}]>)*" if others else ""
        least = "+" if form.get("at_least_one") else "*"
        if form.get("stop_after_first"):
            ended = f"{before} {one}"
            return self._rule(ended if least == "+" else f"{ended} | {before} {rest}")
        return self._rule(f"({before} {one}){least} {before} {rest}")

    def _triggered_by(
        self,
        trigger: str,
        triggers: Sequence[str],
        tags: Sequence[Any],
        place: str,
        depth: int,
    ) -> list[str]:
        """The rest of each tag that a trigger begins."""
        if not trigger:
            raise invalid(f"{place}.triggers", "has an empty text")
        if trigger not in self._token_ids and len(self._pieces(trigger)) > 1:
            problem = "must be one special token, or text without any"
            raise unsupported(f"{place}.triggers[{triggers.index(trigger)}]", problem)
        kinds = []
        for at, tag in enumerate(tags):
            where = f"{place}.tags[{at}]"
            begin = _string(_object(tag, where).get("begin"), f"{where}.begin")
            if not any(begin.startswith(one) for one in triggers):
                raise invalid(f"{where}.begin", "begins with no trigger")
            if begin.startswith(trigger):
                kinds.append(self._tag(tag, where, depth + 1, trigger))
        if not kinds:
            raise invalid(f"{place}.triggers[{triggers.index(trigger)}]", "begins no tag")
        return kinds

    def _spelled_after_text(self, trigger: str, number: int | None) -> str:
        """Any text that ends with the trigger, as text or as a token."""
        name = f"t{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: /{_ANY}{pattern_of(trigger)}/")
        return name if number is None else f"({name} | /{_ANY}/ <[{number}]>)"

    def _separated(self, form: Mapping[str, Any], place: str, depth: int) -> str:
        """Tags with a separator between them, and nothing else."""
        tags = _list(form.get("tags"), f"{place}.tags")
        kinds = [
            self._tag(_object(tag, where), where, depth + 1, "")
            for at, tag in enumerate(tags)
            for where in [f"{place}.tags[{at}]"]
        ]
        one = self._rule(" | ".join(kinds))
        separator = form.get("separator")
        between = self._text(separator, f"{place}.separator") if separator else ""
        many = one if form.get("stop_after_first") else f"{one} ({between} {one})*"
        return self._rule(many if form.get("at_least_one") else f"({many})?")


def _refuse_free(form: Mapping[str, Any], place: str) -> None:
    """Raises RequestError for free text that something follows: its end could not be found."""
    if form.get("type") in ("triggered_tags", "any_text"):
        raise unsupported(place, "is supported at the end alone")
    elements = form.get("elements", [])
    for at, part in enumerate(elements):
        if form["type"] == "or" or at == len(elements) - 1:
            _refuse_free(part, f"{place}.elements[{at}]")
    if isinstance(form.get("content"), dict) and not form.get("end"):
        _refuse_free(form["content"], f"{place}.content")


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid(place, "is missing" if value is None else "must be an object")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise invalid(place, "must be an array with a part")
    return value


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise invalid(place, "must be text")
    limits.check_bytes(place, value, MAX_TEXT_BYTES)
    return value


def parse(text: str, place: str) -> Mapping[str, Any]:
    """A description from its JSON text. Raises RequestError naming `place`."""
    limits.check_bytes(place, text, limits.MAX_SCHEMA_BYTES)
    try:
        value = json.loads(text, parse_float=read_number)
    except (ValueError, RecursionError) as error:
        raise invalid(place, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(place, "must be an object")
    return value
