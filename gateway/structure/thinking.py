"""Grammars of answers that begin with reasoning: first free thought, then what is required.

The thought ends at the marker that closes it, at the latest after a number of tokens if one is
given. From there on the answer has the grammar of its own that it would have without reasoning.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors.request_errors import unsupported
from gateway.structure.calls import AnyStructure, CallsInAnswer
from gateway.structure.writing import parts_of, pattern_of

BUDGET = "thinking_token_budget"
MAX_SPACES = 8  # next to the markers
_ANY = r"(.|\n)*"


@dataclass(frozen=True, slots=True)
class Thought:
    """The form in which the model writes reasoning in this answer, and its limit."""

    opening: str
    closing: str
    is_open: bool  # the prompt has opened it, or the model always begins with it
    max_tokens: int | None  # between the markers; None: any number
    label: str = ""  # text next to the opening, which belongs to it


@dataclass(frozen=True, slots=True)
class ThoughtFirst:
    """Reasoning, and then an answer; without one required, any text."""

    thought: Thought
    answer: AnyStructure | None
    token_ids: Mapping[str, int]  # of markers that are tokens of their own
    text_ids: tuple[int, ...]  # of tokens in free text that no text spells

    @property
    def place(self) -> str:
        """The field that errors name."""
        return BUDGET if self.answer is None else self.answer.place

    def to_grammar(self) -> str:
        """The grammar. Raises RequestError naming the field at fault."""
        rules = ["%llguidance {}", *self._start(), *self._thought()]
        if self.answer is None:
            rules += self._anything()
        grammars: list[dict[str, object]] = [{"name": "start", "lark_grammar": "\n".join(rules)}]
        if self.answer is not None:
            first, *others = parts_of(self.answer.to_grammar())
            grammars += [first | {"name": "answer"}, *others]
        return json.dumps({"grammars": grammars})

    def _start(self) -> list[str]:
        """The rules of the whole answer."""
        open_id = self.token_ids.get(self.thought.opening)
        label = self.thought.label
        opening = json.dumps(self.thought.opening + label)
        if open_id is not None:
            opening = f"<[{open_id}]> {json.dumps(label) if label else ''}".rstrip()
        is_text = isinstance(self.answer, CallsInAnswer) and self.answer.form is None
        after = "rest" if self.answer is None else "@answer" if is_text else "SPACE? @answer"
        without = "plain" if self.answer is None else "@answer"
        # A thought that is open may be opened again; spelled as text, that is text of the thought.
        again = "" if open_id is None else f"(SPACE? {opening})? "
        begin = again if self.thought.is_open else f"SPACE? {opening} "
        kinds = [f"{begin}thought {after}"] + ([] if self.thought.is_open else [without])
        return [f"start: {' | '.join(kinds)}", f"SPACE: /[ \\t\\r\\n]{{1,{MAX_SPACES}}}/"]

    def _thought(self) -> list[str]:
        """The rules of the thought up to the end of the marker that closes it."""
        close_id = self.token_ids.get(self.thought.closing)
        most = self.thought.max_tokens
        if close_id is None:
            if most is not None:
                raise unsupported(BUDGET, "needs a model whose end of reasoning is one token")
            return [f"thought[lazy]: /{_ANY}{pattern_of(self.thought.closing)}/"]
        unclosed = f"/{_ANY}/ & ~/{_ANY}{pattern_of(self.thought.closing)}{_ANY}/"
        if most is not None:
            return [f"thought: bounded <[{close_id}]>", f"bounded[max_tokens={most}]: {unclosed}"]
        others = sorted(set(self.text_ids) - {close_id})
        before = f"(THOUGHT <[{','.join(map(str, others))}]>)* " if others else ""
        return [f"thought: {before}THOUGHT <[{close_id}]>", f"THOUGHT: {unclosed}"]

    def _anything(self) -> list[str]:
        """The rules of text that nothing is required of, special tokens included."""
        rules = ["rest: <[*]>*"]
        if self.thought.is_open:
            return rules
        # Text that begins with no thought: else its tokens would not be counted.
        head = pattern_of(self.thought.opening + self.thought.label)
        begins = f"/{_ANY}/ & ~/[ \\t\\r\\n]*{head}{_ANY}/"
        rules += [f"PLAIN: {begins}", f"TEXT: /{_ANY}/", rf"WORDS: /\s*[^\s]{_ANY}/"]
        open_id = self.token_ids.get(self.thought.opening)
        every = set(self.token_ids.values())
        kinds = [
            f"{text} <[{','.join(map(str, sorted(ids)))}]> TEXT"
            for text, ids in (("PLAIN", every - {open_id}), ("WORDS", every & {open_id}))
            if ids
        ]
        if not every:
            return [*rules, "plain: PLAIN"]
        more = f"<[{','.join(map(str, sorted(every)))}]> TEXT"
        return [*rules, f"plain: PLAIN | ({' | '.join(kinds)}) ({more})*"]
