"""Calls of the MiniMax-M2 family.

What the model writes is <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>
</invoke></minimax:tool_call>, with a line break after each tag but those next to a value, and with
one <invoke> for each of several calls.
"""

import re

from gateway.chat.families.tagged_calls import detector_of, parser_of
from gateway.chat.families.value_end import Tags
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.tagged_calls import TaggedCalls

TAGS = Tags(
    head=re.compile(r'<invoke name="([^">\n]*)">'),
    head_start='<invoke name="',
    key=re.compile(r'<parameter name="([^">\n]*)">'),
    key_start='<parameter name="',
    value_end="</parameter>",
    call_end="</invoke>",
    has_line_breaks=False,
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
)

MINIMAX_M2 = ToolCallFormat(
    "minimax_m2",
    parser_of(TAGS),
    lambda template: TAGS.opening in template and "<invoke name=" in template,
    shown_tokens=(TAGS.opening, TAGS.closing),
    writing=TaggedCalls(
        TAGS.opening,
        TAGS.closing,
        name_start=(TAGS.head_start,),
        name_end=('">',),
        key_start=(TAGS.key_start,),
        value_start=('">',),
        value_end=TAGS.value_end,
        call_end=(TAGS.call_end,),
        is_section=True,
        ends_of_keys='<>\n"',
    ),
    openings=(TAGS.opening, TAGS.head_start),
    is_call=detector_of(TAGS),
)
