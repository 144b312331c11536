"""Structured output: the forms that a client can request, and their grammars.

`grammars` checks whether a grammar can be followed, `json_schema` whether a schema can be
guaranteed.
"""

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError, invalid, unsupported
from gateway.structure import json_schema
from gateway.structure.exact.grammar import exact_grammar, rounds, without_rounded
from gateway.structure.rewriting import rewrite

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A line break with indentation, or a few blanks: covers common layouts, but is bounded. With
# unbounded blanks a small model may write them forever.
DEFAULT_WHITESPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,4}"
# One spelling per character, so that no key can evade its schema by another spelling.
ESCAPES = 'nrbtf\\"'

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that matches a schema."""

    place: str  # the request's field, for errors
    schema: Any
    whitespace: str | None = None  # regular expression; "": no whitespace
    is_loose: bool = False  # it describes: what cannot be held is left out

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError naming the place at fault."""
        if self.whitespace is not None:
            limits.check_bytes("whitespace_pattern", self.whitespace, limits.MAX_WHITESPACE_BYTES)
        try:
            json_schema.check(self.schema, self.place, is_loose=self.is_loose)
            return self.grammar_of(self.schema)
        except RequestError as error:
            if not self.is_loose or error.kind is not ErrorKind.UNSUPPORTED:
                raise
            return self.grammar_of(ANY_OBJECT)

    def grammar_of(self, schema: Any) -> str:
        """The grammar of a schema, or of a part of it. Raises RequestError if it is no JSON."""
        blanks = DEFAULT_WHITESPACE if self.whitespace is None else self.whitespace
        options: JsonCompileOptions = {
            "whitespace_pattern": blanks or None,
            "whitespace_flexible": bool(blanks),
            "json_allowed_escapes": ESCAPES,
        }
        rewritten = rewrite(schema, self.place, is_loose=self.is_loose)
        if rounds(rewritten):
            try:
                return exact_grammar(rewritten, schema, self.place, options, blanks)
            except RequestError:
                if not self.is_loose:
                    raise
            rewritten = without_rounded(rewritten)
        try:
            return LLMatcher.grammar_from_json_schema(
                json.dumps(rewritten, ensure_ascii=False), overrides=options
            )
        except (ValueError, RecursionError) as error:
            raise invalid(self.place, f"is no schema: {error}") from error


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole."""

    place: str
    pattern: str

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError if it is empty or too long."""
        _check_text(self.place, self.pattern)
        # Otherwise digits, word characters and blanks of every script would match.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(self.pattern, 'dws')}/")


@dataclass(frozen=True, slots=True)
class OneOfTexts:
    """One of the given texts."""

    place: str
    options: tuple[str, ...]

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError if there are no texts, too many, or an empty one."""
        if not self.options:
            raise invalid(self.place, "is empty")
        limits.check_count(self.place, len(self.options), limits.MAX_CHOICE_OPTIONS)
        for index, option in enumerate(self.options):
            _check_text(f"{self.place}[{index}]", option)
        quoted = (json.dumps(option, ensure_ascii=False) for option in self.options)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


@dataclass(frozen=True, slots=True)
class ContextFree:
    """Text of a context-free grammar, in the notation of Lark or of GBNF."""

    place: str
    text: str

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError if it has settings beyond its form."""
        _check_text(self.place, self.text)
        if "::=" not in self.text:
            _refuse_sampling(self.place, self.text)
            return LLMatcher.grammar_from_lark(self.text)
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(self.text))
        except Exception as error:  # the library raises nothing more precise for a missing rule
            raise invalid(self.place, f"is no GBNF: {error}") from error


@dataclass(frozen=True, slots=True)
class CallList:
    """A JSON list of calls, at least one, with arguments as their functions' schemas say."""

    place: str
    functions: tuple[tuple[str, JsonSchema], ...]  # by name
    max_calls: int

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError naming the place at fault in a schema.

        Each schema becomes a grammar of its own, so that its references stay valid.
        """
        kinds, grammars = [], []
        for index, (name, schema) in enumerate(self.functions):
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
            kinds.append(f'{json.dumps(head, ensure_ascii=False)} @f{index} "}}"')
            (grammar,) = json.loads(schema.to_grammar())["grammars"]
            grammars.append(grammar | {"name": f"f{index}"})
        more = f'(", " call){{0,{self.max_calls - 1}}}' if self.max_calls > 1 else ""
        lark = f'start: "[" call {more} "]"\ncall: ' + " | ".join(kinds)
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *grammars]})


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar as this server compiled it for an earlier step of the same request."""

    place: str
    text: str

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError if it has not the form of one, or has settings."""
        limits.check_bytes(self.place, self.text, limits.MAX_COMPILED_GRAMMAR_BYTES)
        for lark in self._lark_parts():
            _check_text(self.place, lark, limits.MAX_COMPILED_GRAMMAR_BYTES)
            _refuse_sampling(self.place, lark)
        return self.text

    def _lark_parts(self) -> list[str]:
        """The parts in Lark's notation: the whole of a text, some of the grammars of an object."""
        if not self.text.startswith("{"):
            return [self.text]
        try:
            grammar = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise invalid(self.place, "is no JSON") from error
        if not isinstance(parts := grammar.get("grammars"), list):
            raise invalid(self.place, "has no list of grammars")
        larks = [part.get("lark_grammar") for part in parts if isinstance(part, dict)]
        return [lark for lark in larks if isinstance(lark, str)]


# Forms that a request may ask for.
Structure = JsonSchema | Regex | OneOfTexts | ContextFree | Compiled

_RULE_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)


def _refuse_sampling(place: str, text: str) -> None:
    if _RULE_TEMPERATURE.search(text):
        raise unsupported(place, "a rule's temperature is not supported; the request has one")


def _check_text(place: str, text: str, most_bytes: int = limits.MAX_GRAMMAR_BYTES) -> None:
    limits.check_bytes(place, text, most_bytes)
    if not text:
        raise invalid(place, "is empty")
