"""Texts and grammars as parts of other grammars. Pure."""

import json


def pattern_of(text: str) -> str:
    """A regular expression of a text."""
    return "".join(f"\\{char}" if char in r"[](){}|./\*+?^$" else char for char in text)


def parts_of(grammar: str) -> list[dict[str, object]]:
    """The grammars in a grammar; the first is where it starts. Those in Lark's notation are one."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, object]] = json.loads(grammar)["grammars"]
    return parts


def named_grammar(name: str, grammar: str) -> dict[str, object]:
    """The only part of a grammar, under another name."""
    (part,) = parts_of(grammar)
    return part | {"name": name}
