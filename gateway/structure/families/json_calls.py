"""Calls as JSON: a name and its arguments, alone, in a list or in a row."""

import json
from dataclasses import dataclass

from gateway.structure.calls import ANY_TEXT, PLAIN_NAME, CallsInAnswer, Inner, without


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects."""

    opening: str
    closing: str = ""
    arguments: str = "arguments"  # the key of the arguments
    is_list: bool = False  # after the opening comes a JSON list of calls, or one as name{...}
    begins_bare: bool = False  # an answer that begins with a brace is a call, too

    def rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of the whole answer."""
        begun = self._bare_rules if self.begins_bare and answer.form is None else None
        opened = answer.opened_rules(inner) if begun is None else begun(answer)
        return [*opened, *self._call_rules(answer, inner)]

    def _bare_rules(self, answer: CallsInAnswer) -> list[str]:
        """Text for good, or a call for good: the first character that is no space decides."""
        many, marker = "*" if answer.is_parallel else "?", answer.token_of(self.opening)
        next_calls = f"({marker} group){many}" if marker else ""
        after_call = next_calls if answer.is_parallel else ""
        return [
            f"start: GAP? group {after_call} | PLAIN {next_calls}",
            rf"PLAIN: /\s*([^{{\s]{ANY_TEXT})?/ & {without(self.opening)}",
            r"GAP: /[ \n]{1,2}/",
        ]

    def _call_rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of what follows an opening, and of each function's call."""
        calls, named = [], []
        for name, schema in answer.functions:
            quoted, key = json.dumps(name, ensure_ascii=False), json.dumps(self.arguments)
            head = json.dumps(f'{{"name": {quoted}, {key}: ', ensure_ascii=False)
            arguments = inner.add(schema)
            calls.append(f'{head} {arguments} "}}"')
            if PLAIN_NAME.fullmatch(name):
                named.append(f"{quoted} args? {arguments}")
        rules = [f"call: {' | '.join(calls)}"]
        more = '({} " "? call)*' if answer.is_parallel else ""
        if self.is_list:
            kinds = [f'"[" call {more.format(json.dumps(","))} "]"', *named]
            args = [f"args: {answer.spelled('[ARGS]')}"] if named else []
            return [f"group: GAP? ({' | '.join(kinds)})", *args, *rules]
        if self.begins_bare:
            return [f"group: GAP? call {more.format(json.dumps(';'))}", *rules]
        close = f"close: {answer.spelled(self.closing)}"
        return ["group: GAP? call GAP? close", close, *rules]


@dataclass(frozen=True, slots=True)
class SectionCalls:
    """JSON arguments between markers, after the name: the families of Kimi K2 and DeepSeek V3."""

    opening: str
    closing: str
    call_opening: str
    call_closing: str
    before_name: tuple[str, ...]  # markers and texts
    after_name: tuple[str, ...]
    after_arguments: tuple[str, ...] = ()
    is_numbered: bool = False  # a number follows the first text after the name
    begins_bare: bool = False

    def rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of the whole answer."""
        before = map(answer.written, self.before_name)
        after = [*map(answer.written, self.after_name)]
        if self.is_numbered:
            after.insert(1, "NUMBER")
        names = [f"{json.dumps(name)} after {inner.add(schema)}" for name, schema in answer.named()]
        end = map(answer.written, (*self.after_arguments, self.call_closing))
        return [
            *answer.opened_rules(inner),
            f"group: GAP? call {'(GAP? call)*' if answer.is_parallel else ''} GAP? close",
            f"call: begin ({' | '.join(names)}) end",
            f"begin: {' '.join([answer.written(self.call_opening), *before])}",
            f"after: {' '.join(after)}",
            f"end: {' '.join(end)}",
            f"close: {answer.written(self.closing)}",
            *(["NUMBER: /[0-9]{1,4}/"] if self.is_numbered else []),
        ]
