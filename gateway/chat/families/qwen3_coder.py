"""Calls of the Qwen3-Coder family, which Qwen3.5, Nemotron 3 and Step 3.7 write too.

What the model writes is
<tool_call><function=f><parameter=a>1</parameter></function></tool_call>, with line breaks between.
"""

import re

from gateway.chat.families.tagged_calls import detector_of, parser_of
from gateway.chat.families.value_end import Tags
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.tagged_calls import TaggedCalls

TAGS = Tags(
    head=re.compile(r"<function=([^>\n]*)>"),
    head_start="<function=",
    key=re.compile(r"<parameter=([^>\n]*)>"),
    key_start="<parameter=",
    value_end="</parameter>",
    call_end="</function>",
    has_line_breaks=True,
)

QWEN3_CODER = ToolCallFormat(
    "qwen3_coder",
    parser_of(TAGS),
    lambda template: TAGS.opening in template and TAGS.key_start in template,
    shown_tokens=(TAGS.opening, TAGS.closing),
    writing=TaggedCalls(
        TAGS.opening,
        TAGS.closing,
        name_start=(TAGS.head_start,),
        name_end=(">",),
        key_start=(TAGS.key_start,),
        value_start=(">",),
        value_end=TAGS.value_end,
        call_end=(TAGS.call_end,),
        has_line_breaks=True,
    ),
    openings=(TAGS.opening, TAGS.head_start),
    is_call=detector_of(TAGS),
)
