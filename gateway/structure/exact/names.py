"""Names of members and other texts as a grammar in Lark's notation has them. Pure."""

import json
import re
from typing import Any

from llguidance import regex_to_lark

from gateway.structure.exact.failures import NotWritten

CHARACTERS = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*'  # of a JSON string
_PLAIN = r'[^"\\\x00-\x1F\x7F]*'
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def quoted(value: Any) -> str:
    """A text, true, false or null in JSON, as a literal of the grammar."""
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)


def searched(pattern: str) -> str:
    """The terminal of a name in quotes in which a pattern is found. Raises NotWritten."""
    tokens = _TOKEN.findall(pattern)
    is_begun, is_ended = tokens[:1] == ["^"], len(tokens) > 1 and tokens[-1] == "$"
    inner = tokens[int(is_begun) : len(tokens) - int(is_ended)]
    if {"^", "$"} & {*inner} or ((is_begun or is_ended) and "|" in inner):
        raise NotWritten("a pattern of names has anchors inside")
    before, after = "" if is_begun else _PLAIN, "" if is_ended else _PLAIN
    return f'/"{before}({regex_to_lark("".join(inner), "dw")}){after}"/'
