"""Answers in channels, as the harmony format of gpt-oss: thoughts, calls, text and forms.

Messages are marked by tokens of their own, which no text can spell. With a form the answer is
thoughts and then the form or calls.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors.request_errors import unsupported
from gateway.structure.calls import ANY_TEXT, CallsInAnswer, Inner, without


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """The markers of messages, and how calls stand among them."""

    opening: str  # of a message's channel
    message: str  # of its text
    start: str
    constrain: str
    end: str  # of a message that others follow
    other_ends: tuple[str, ...]
    begins_bare: bool = False

    def rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of the whole answer. Raises RequestError if a marker is no token."""
        markers = (self.opening, self.message, self.start, self.constrain, self.end)
        if not all(marker in answer.token_ids for marker in markers):
            raise unsupported(answer.place, "needs a model whose channels are marked by tokens")
        channel, message = answer.token_of(self.opening), answer.token_of(self.message)
        ends = (self.end, *self.other_ends)
        known = [answer.token_of(end) for end in ends if end in answer.token_ids]
        return [
            *(self._free(answer) if answer.form is None else self._formed(answer, inner)),
            f'begun: {answer.token_of(self.start)} "assistant"',
            f"next: {answer.token_of(self.end)} begun",
            f"end: {' | '.join(known)}",
            f'thought: {channel} "analysis" {message} BODY',
            f"BODY: {_text_without((self.start, *ends))}",
            *self._call_rules(answer, inner),
        ]

    def _free(self, answer: CallsInAnswer) -> list[str]:
        """The rules of an answer in which text is free."""
        channel, message = answer.token_of(self.opening), answer.token_of(self.message)
        kinds, call = "thought | said", "call"
        if answer.is_parallel:
            kinds, call = "thought | said | call", ""
        last = "(end begun call)?" if call else ""
        alone = "| begun? call" if call else ""
        return [
            f"start: ((begun? one | LOOSE) (end begun one)* {last} {alone}) end?",
            f"one: {kinds}",
            f'said: {channel} ("commentary" | "final") {message} BODY',
            # A message that goes on, or text of a model that uses no channels.
            f"LOOSE: {_text_without((self.start, self.message, self.end, *self.other_ends))}",
        ]

    def _formed(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of an answer that ends with a form, or with calls."""
        assert answer.form is not None
        channel, message = answer.token_of(self.opening), answer.token_of(self.message)
        form = f'form: {channel} "final" constrained? {message} {inner.add(answer.form)}'
        if not answer.functions:
            return ["start: begun? (thought next)* form", form, *self._constrained(answer)]
        more = "(end begun (thought next)* call)*" if answer.is_parallel else ""
        return [f"start: begun? (thought next)* (form | call {more} end?)", form]

    def _call_rules(self, answer: CallsInAnswer, inner: Inner) -> list[str]:
        """The rules of calls: the function may be named before the channel, or after it."""
        if not answer.functions:
            return []
        channel, message = answer.token_of(self.opening), answer.token_of(self.message)
        calls = []
        for name, schema in answer.named():
            arguments = f"constrained? {message} {inner.add(schema)}"
            named = json.dumps(f"commentary to=functions.{name}")
            calls.append(f"{channel} {named} {arguments}")
            before = json.dumps(f" to=functions.{name}")
            calls.append(f'{before} {channel} "commentary" {arguments}')
        return [f"call: {' | '.join(calls)}", *self._constrained(answer)]

    def _constrained(self, answer: CallsInAnswer) -> list[str]:
        return [f'constrained: " json" | " "? {answer.token_of(self.constrain)} "json"']


def _text_without(markers: Iterable[str]) -> str:
    """Text that spells none of some markers: its reader sees text alone."""
    return " & ".join([f"/{ANY_TEXT}/", *map(without, markers)])
