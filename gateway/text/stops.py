"""Finds stop strings in text that arrives in pieces.

One Aho-Corasick automaton holds all stop strings, so the cost is one step per character whatever
their number and length, and the result does not depend on how the text was split. The match that
ends first wins; of those that end together, the longest. Pure; does not handle tokens.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Pattern(NamedTuple):
    """A stop string, and a way in which an output may have it."""

    text: str
    stop: str


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of a stop string."""

    depth: int
    children: "dict[str, _Node]"
    fallback: "_Node | None" = None  # the longest proper suffix that is also a prefix
    match: "Pattern | None" = None  # the longest that ends here


@lru_cache(maxsize=256)
def _automaton(patterns: tuple[Pattern, ...]) -> _Node:
    root = _Node(0, {})
    for pattern in patterns:
        node = root
        for char in pattern.text:
            node = node.children.setdefault(char, _Node(node.depth + 1, {}))
        node.match = pattern
    # Breadth first: a fallback is shallower, hence complete before it is used.
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for char, child in node.children.items():
            fallback = _step(node.fallback, char, root)
            child.fallback = fallback
            child.match = child.match or fallback.match
            waiting.append(child)
    return root


def _step(node: _Node | None, char: str, root: _Node) -> _Node:
    while node is not None:
        found = node.children.get(char)
        if found is not None:
            return found
        node = node.fallback
    return root


class StopMatcher:
    """Matches the stop strings of one output.

    `others` are further patterns of them, as those in which tokens stand that have no text.
    """

    def __init__(
        self, stops: tuple[str, ...], *, include_in_output: bool, others: tuple[Pattern, ...] = ()
    ) -> None:
        self._root = _automaton((*(Pattern(stop, stop) for stop in stops), *others))
        self._node = self._root
        self._include = include_in_output
        self._held = ""  # text seen that may begin a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds text; returns (text to show now, stop string that ended it or None).

        Without may_stop, stop strings are ordinary text.
        """
        node, root = self._node, self._root
        for index, char in enumerate(text):
            node = node.children.get(char) or _step(node.fallback, char, root)
            if node.match is not None and may_stop:
                return self._end(text[: index + 1], node.match)
        self._node = node
        if self._include:
            return text, None
        # Only the longest tail that begins a stop string is withheld: node.depth characters.
        seen = self._held + text
        cut = len(seen) - node.depth
        self._held = seen[cut:]
        return seen[:cut], None

    def skip(self, text: str) -> str:
        """Passes by text in which no stop string counts; returns it after what was withheld."""
        self._node = self._root
        return self.flush() + text

    def _end(self, text: str, found: Pattern) -> tuple[str, str]:
        if self._include:
            return text, found.stop
        return (self._held + text)[: -len(found.text)], found.stop

    def flush(self) -> str:
        """The text withheld so far, at the end."""
        held, self._held = self._held, ""
        return held
