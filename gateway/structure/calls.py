"""Grammars of answers that may hold tool calls in the model's own format.

Text stays free until a call begins; from then on the call follows its function's schema. With a
form the answer is calls alone, or the form.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.errors.request_errors import unsupported
from gateway.structure.structure import CallList, JsonSchema, Structure
from gateway.structure.tags import Asked
from gateway.structure.writing import named_grammar, pattern_of

PLAIN_NAME = re.compile(r"[\w.-]{1,128}")  # can be told from the arguments that follow it
ANY_TEXT = r"(.|\n)*"


class Inner:
    """The grammars that the rules of an answer name, each one its own: references stay valid."""

    def __init__(self) -> None:
        self.grammars: list[dict[str, object]] = []

    def add(self, structure: Structure) -> str:
        """The name of a structure's grammar in a rule. Raises RequestError."""
        name = f"g{len(self.grammars)}"
        self.grammars.append(named_grammar(name, structure.to_grammar()))
        return f"@{name}"


class CallWriting(Protocol):
    """The form in which a model family writes calls."""

    @property
    def opening(self) -> str:
        """The text that begins calls."""
        ...

    @property
    def begins_bare(self) -> bool:
        """True if an answer that begins with a brace is a call, too."""
        ...

    def rules(self, answer: "CallsInAnswer", inner: Inner) -> list[str]:
        """The rules of the whole answer. Raises RequestError for what cannot be written."""
        ...


@dataclass(frozen=True, slots=True)
class CallsInAnswer:
    """Calls wherever the answer opens one; the rest is free text or, with a form, nothing."""

    place: str
    functions: tuple[tuple[str, JsonSchema], ...]  # by name
    writing: CallWriting
    is_parallel: bool  # whether there may be several calls
    token_ids: Mapping[str, int]  # of markers that are tokens of their own
    text_ids: tuple[int, ...] = ()  # of tokens in free text that no text spells, such as <think>
    form: Structure | None = None  # what an answer without calls must be

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError naming the place at fault in a schema or the form."""
        inner = Inner()
        rules = "\n".join(["%llguidance {}", *self.writing.rules(self, inner)])
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": rules}, *inner.grammars]})

    def opened_rules(self, inner: Inner) -> list[str]:
        """The rules of an answer in which `group` is what follows the opening of calls."""
        many, opening = "*" if self.is_parallel else "?", self.writing.opening
        marker = self.token_of(opening)
        gap = r"GAP: /[ \n]{1,2}/"
        if self.form is not None:
            more = "(GAP? open group)*" if self.is_parallel else ""
            start = f"start: open group {more} | {inner.add(self.form)}"
            return [start, f"open: {self.spelled(opening)}", gap]
        heads = ["spelled", *([f"TEXT {marker}"] if marker else [])]
        others = set(self.text_ids) - {self.token_ids.get(opening)}
        before = f"(TEXT <[{','.join(map(str, sorted(others)))}]>)*" if others else ""
        return [
            f"start: ({before} head group){many} {before} REST",
            f"head: {' | '.join(heads)}",
            f"spelled[lazy]: TEXT {json.dumps(opening)}",
            f"TEXT: /{ANY_TEXT}/",
            f"REST: /{ANY_TEXT}/ & {without(opening)}",
            gap,
        ]

    def token_of(self, marker: str) -> str:
        """The marker as one token; empty where it is none."""
        return f"<[{self.token_ids[marker]}]>" if marker in self.token_ids else ""

    def spelled(self, marker: str) -> str:
        """The marker as a token or as text."""
        return " | ".join(filter(None, [json.dumps(marker), self.token_of(marker)]))

    def written(self, marker: str) -> str:
        """The marker as a token where it is one, else as text."""
        return self.token_of(marker) or json.dumps(marker)

    def sequence(self, markers: Iterable[str]) -> str:
        """Markers one after the other, perhaps with a line break between them."""
        return " GAP? ".join(self.written(marker) for marker in markers)

    def named(self) -> list[tuple[str, JsonSchema]]:
        """The functions, once it is known that all can be called by their names alone."""
        for name, schema in self.functions:
            if not PLAIN_NAME.fullmatch(name):
                place = f"{schema.place.removesuffix('.parameters')}.name"
                raise unsupported(place, "cannot be written in this model's format of calls")
        return list(self.functions)


def without(text: str) -> str:
    """The texts that do not hold another one, for use in a terminal."""
    return f"~/{ANY_TEXT}{pattern_of(text)}{ANY_TEXT}/"


AnyStructure = Asked | CallList | CallsInAnswer
