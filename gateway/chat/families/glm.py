"""Calls of the GLM-4.5 family and its followers.

What the model writes is <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>.
"""

import re

from gateway.chat.families.tagged_calls import detector_of, parser_of
from gateway.chat.families.value_end import Tags
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.tagged_calls import TaggedCalls

TAGS = Tags(
    head=re.compile(r"([^<\n]*)(?=[<\n])"),
    head_start="",
    key=re.compile(r"<arg_key>([^<\n]*)</arg_key>\s*<arg_value>"),
    key_start="<arg_key>",
    value_end="</arg_value>",
    call_end="",
    has_line_breaks=False,
)
KEY_END, VALUE_START = "</arg_key>", "<arg_value>"
TOKENS = (TAGS.opening, TAGS.closing, TAGS.key_start, KEY_END, VALUE_START, TAGS.value_end)

GLM = ToolCallFormat(
    "glm",
    parser_of(TAGS),
    lambda template: TAGS.opening in template and TAGS.key_start in template,
    shown_tokens=TOKENS,
    writing=TaggedCalls(
        TAGS.opening,
        TAGS.closing,
        key_start=(TAGS.key_start,),
        value_start=(KEY_END, VALUE_START),
        value_end=TAGS.value_end,
    ),
    openings=(TAGS.opening,),
    is_call=detector_of(TAGS),
)
