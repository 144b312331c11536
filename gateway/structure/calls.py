"""Grammars of answers that may hold tool calls in the model's own format.

Text stays free until a call begins; from then on the call follows its function's schema. With a
form the answer is calls alone, or the form.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.structure.structure import CallList, JsonSchema, Structure
from gateway.structure.tags import Asked
from gateway.structure.writing import named_grammar, pattern_of

PLAIN_NAME = re.compile(r"[\w.-]{1,128}")  # can be told from the arguments that follow it
_ANY = r"(.|\n)*"


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How a model family writes calls."""

    opening: str
    closing: str = ""
    arguments: str = "arguments"  # the key of the arguments
    is_list: bool = False  # after the opening comes a JSON list of calls, or one as name{...}
    begins_bare: bool = False  # an answer that begins with a brace is a call, too


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
        """The grammar. Raises RequestError naming the place at fault in a schema or the form.

        Each schema becomes a grammar of its own, so that its references stay valid.
        """
        grammars = [
            named_grammar(f"f{index}", schema.to_grammar())
            for index, (_, schema) in enumerate(self.functions)
        ]
        if self.form is not None:
            grammars.append(named_grammar("form", self.form.to_grammar()))
        rules = "\n".join(["%llguidance {}", *self._answer_rules(), *self._call_rules()])
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": rules}, *grammars]})

    def _answer_rules(self) -> list[str]:
        """The rules of the whole answer; `group` is what follows an opening."""
        many, marker = "*" if self.is_parallel else "?", self._token_of(self.writing.opening)
        if self.form is not None:
            more = "(GAP? open group)*" if self.is_parallel else ""
            opening = self._spelled(self.writing.opening)
            return [f"start: open group {more} | @form", f"open: {opening}"]
        unopened = f"~/{_ANY}{pattern_of(self.writing.opening)}{_ANY}/"
        if self.writing.begins_bare:
            # Text for good, or a call for good: the first character that is no space decides.
            next_calls = f"({marker} group){many}" if marker else ""
            after_call = next_calls if self.is_parallel else ""
            plain = rf"PLAIN: /\s*([^{{\s]{_ANY})?/ & {unopened}"
            return [f"start: GAP? group {after_call} | PLAIN {next_calls}", plain]
        heads = ["spelled", *([f"TEXT {marker}"] if marker else [])]
        others = set(self.text_ids) - {self.token_ids.get(self.writing.opening)}
        before = f"(TEXT <[{','.join(map(str, sorted(others)))}]>)*" if others else ""
        return [
            f"start: ({before} head group){many} {before} REST",
            f"head: {' | '.join(heads)}",
            f"spelled[lazy]: TEXT {json.dumps(self.writing.opening)}",
            f"TEXT: /{_ANY}/",
            f"REST: /{_ANY}/ & {unopened}",
        ]

    def _call_rules(self) -> list[str]:
        """The rules of what follows an opening, and of each function's call."""
        calls, named = [], []
        for index, (name, _) in enumerate(self.functions):
            quoted, key = json.dumps(name, ensure_ascii=False), json.dumps(self.writing.arguments)
            head = json.dumps(f'{{"name": {quoted}, {key}: ', ensure_ascii=False)
            calls.append(f'{head} @f{index} "}}"')
            if PLAIN_NAME.fullmatch(name):
                named.append(f"{quoted} args? @f{index}")
        rules = [f"call: {' | '.join(calls)}", r"GAP: /[ \n]{1,2}/"]
        more = '({} " "? call)*' if self.is_parallel else ""
        if self.writing.is_list:
            kinds = [f'"[" call {more.format(json.dumps(","))} "]"', *named]
            args = [f"args: {self._spelled('[ARGS]')}"] if named else []
            return [f"group: GAP? ({' | '.join(kinds)})", *args, *rules]
        if self.writing.begins_bare:
            return [f"group: GAP? call {more.format(json.dumps(';'))}", *rules]
        return [
            "group: GAP? call GAP? close",
            f"close: {self._spelled(self.writing.closing)}",
            *rules,
        ]

    def _token_of(self, marker: str) -> str:
        """The marker as one token; empty where it is none."""
        return f"<[{self.token_ids[marker]}]>" if marker in self.token_ids else ""

    def _spelled(self, marker: str) -> str:
        """The marker as a token or as text."""
        return " | ".join(filter(None, [json.dumps(marker), self._token_of(marker)]))


AnyStructure = Asked | CallList | CallsInAnswer
