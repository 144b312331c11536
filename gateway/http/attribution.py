"""Leaves the line by which Claude Code attributes a request out of the prompt.

The line names the client's version and changes from request to request, so nothing that follows it
could be found in the prefix cache. It is accounting of the service that the client was written for.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from gateway.chat.conversation import Message

# The header with its pairs `name=value;`; the last pair of a line may stand without the semicolon.
_LINE = re.compile(
    r"x-anthropic-billing-header:"
    r"(?:[ \t]*[\w.-]+=[^;\s]*(?:;|(?=[ \t]*(?:[\r\n]|\Z))))*"
    r"[ \t]*[\r\n]*"
)


def without_attribution(text: str) -> str:
    """The text without the line that it begins with; any other text is returned as it is."""
    found = _LINE.match(text)
    return text if found is None else text[found.end() :]


def unattributed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The turns without the line, with which the first may begin where a proxy translated it."""
    first, rest = messages[:1], tuple(messages[1:])
    if not first or first[0].content is None:
        return tuple(messages)
    text = without_attribution(first[0].content)
    if text == first[0].content:
        return tuple(messages)
    return (replace(first[0], content=text), *rest) if text or not rest else rest
