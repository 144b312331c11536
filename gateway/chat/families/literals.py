"""Values that a model writes as literals of a language of its own, as JSON. Pure.

A reader suspends where it needs more text, and takes nothing: its result is the JSON of a value
with the offset after it, or None where none is.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.chat.calls import Calls
from gateway.chat.source import Source, Steps, beginning
from gateway.text.unicode import to_json

MAX_DEPTH = 128
MAX_WORD_CHARACTERS = 4096  # of a name, a number or a constant
Read = tuple[str, int]  # the JSON of a value, and the offset after it

_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"([+-]?)0*([0-9]+)((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_WORD_END = re.compile(r"[\s,\[\](){}:=]")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))",
    re.DOTALL,
)
_PLAIN_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "/": "/",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_AFTER_TEXT = ",)]}:"


@dataclass(frozen=True, slots=True)
class NamedValues:
    """The marks of a list of names and values."""

    closing: str
    separator: str  # between a name and its value
    has_bare_names: bool  # names without quotes


@dataclass(frozen=True, slots=True)
class Quote:
    """The mark that begins and ends a text."""

    mark: str
    # Backslashes mean what they do in Python, and a mark ends a text only where a text may end:
    # models write apostrophes in it.
    has_escapes: bool = True


@dataclass(frozen=True, slots=True)
class Language:
    """A notation of values."""

    quotes: tuple[Quote, ...]
    objects: NamedValues

    def value(self, source: Source, at: int, depth: int = 0) -> Steps[Read | None]:
        """Reads a value at an offset; space may precede it."""
        at = yield from source.skip_space(at)
        for quote in self.quotes:
            if (yield from source.starts_with(quote.mark, at)):
                text = yield from _text(source, at + len(quote.mark), quote)
                return None if text is None else (to_json(text[0]), text[1])
        if at >= len(source.text) or depth > MAX_DEPTH:
            return None
        match source.text[at]:
            case "[":
                return (yield from self._list(source, at + 1, depth + 1))
            case "{":
                return (yield from self.members(source, at + 1, self.objects, depth + 1))
        return (yield from _word(source, at))

    def members(
        self, source: Source, at: int, form: NamedValues, depth: int = 0
    ) -> Steps[Read | None]:
        """Reads names and values up to what closes them, as an object.

        The offset is that after what opens them. Of arguments, which have depth 0, the first of a
        name counts.
        """
        names: set[str] = set()
        found: list[str] = []
        while True:
            at = yield from source.skip_space(at)
            if (yield from source.starts_with(form.closing, at)):
                return f"{{{', '.join(found)}}}", at + len(form.closing)
            name = yield from self._name(source, at, form)
            value = None if name is None else (yield from self.value(source, name[1], depth))
            if name is None or value is None:
                return None
            if depth or name[0] not in names:
                found.append(f"{to_json(name[0])}: {value[0]}")
            names.add(name[0])
            after = yield from self._next(source, value[1], form.closing)
            if after is None:
                return None
            at = after

    def _list(self, source: Source, at: int, depth: int) -> Steps[Read | None]:
        items: list[str] = []
        while True:
            at = yield from source.skip_space(at)
            if (yield from source.starts_with("]", at)):
                return f"[{', '.join(items)}]", at + 1
            item = yield from self.value(source, at, depth)
            if item is None:
                return None
            items.append(item[0])
            after = yield from self._next(source, item[1], "]")
            if after is None:
                return None
            at = after

    def _next(self, source: Source, at: int, closing: str) -> Steps[int | None]:
        """The offset after a comma, or of what closes; None where neither follows."""
        at = yield from source.skip_space(at)
        if (yield from source.starts_with(",", at)):
            return at + 1
        return at if (yield from source.starts_with(closing, at)) else None

    def _name(self, source: Source, at: int, form: NamedValues) -> Steps[tuple[str, int] | None]:
        """A name, and the offset after its separator."""
        for quote in self.quotes:
            if (yield from source.starts_with(quote.mark, at)):
                text = yield from _text(source, at + len(quote.mark), quote)
                if text is None:
                    return None
                end = yield from source.skip_space(text[1])
                is_name = yield from source.starts_with(form.separator, end)
                return (text[0], end + len(form.separator)) if is_name else None
        if not form.has_bare_names:
            return None
        word_end = yield from _end_of(source, at, lambda: source.text.find(form.separator, at))
        if word_end is None:
            return None
        name = source.text[at:word_end].strip()
        is_name = bool(name) and not set(name) & {*",[](){}<>\"'="}
        return (name, word_end + len(form.separator)) if is_name else None


def _text(source: Source, at: int, quote: Quote) -> Steps[tuple[str, int] | None]:
    """A text whose opening quote ends at an offset, and the offset after its end."""
    end = at
    while True:
        found = source.text.find(quote.mark, end)
        if found < 0:
            end = max(end, len(source.text) - beginning(source.text, quote.mark))
            if not (yield from source.more()):
                return None
            continue
        end = found + len(quote.mark)
        if not quote.has_escapes:
            return source.text[at:found], end
        if _is_escaped(source.text, at, found):
            continue
        after = yield from source.skip_space(end)
        if after >= len(source.text) or source.text[after] in _AFTER_TEXT:
            return _ESCAPE.sub(_unescaped, source.text[at:found]), end


def _is_escaped(text: str, start: int, at: int) -> bool:
    """True if an odd number of backslashes precedes an offset."""
    first = at
    while first > start and text[first - 1] == "\\":
        first -= 1
    return (at - first) % 2 == 1


def _unescaped(match: re.Match[str]) -> str:
    for digits in match.groups()[:3]:
        if digits is not None:
            return chr(int(digits, 16))
    return _PLAIN_ESCAPES.get(match[4], match[0])


def _word(source: Source, at: int) -> Steps[Read | None]:
    """Reads a number or a constant."""

    def end() -> int:
        found = _WORD_END.search(source.text, at)
        return -1 if found is None else found.start()

    word_end = yield from _end_of(source, at, end)
    if word_end is None:
        return None
    word = source.text[at:word_end]
    if word in _CONSTANTS:
        return _CONSTANTS[word], word_end
    number = _NUMBER.fullmatch(word)
    if number is None:
        return None
    sign, digits, rest = number.groups()
    return f"{sign.replace('+', '')}{digits}{rest}", word_end


def _end_of(source: Source, at: int, find: Callable[[], int]) -> Steps[int | None]:
    """The offset that is found, once it is; None where it is not near enough."""
    while (end := find()) < 0:
        if len(source.text) - at > MAX_WORD_CHARACTERS or not (yield from source.more()):
            return None
    return end if end - at <= MAX_WORD_CHARACTERS else None


def read_literal_arguments(
    source: Source,
    head: re.Match[str] | None,
    calls: Calls,
    language: Language,
    members: NamedValues,
) -> Steps[bool]:
    """Reads the arguments after a call's head, whose first group is the name, as a whole.

    Returns False, with nothing taken, without a head or where they are none.
    """
    if head is None:
        return False
    arguments = yield from language.members(source, head.end(), members)
    if arguments is None:
        return False
    text, end = arguments
    calls.begin(head[1])
    calls.add_arguments(text)
    source.take(end)
    return True
