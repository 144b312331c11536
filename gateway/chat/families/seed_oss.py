"""Calls and reasoning of the Seed-OSS family.

What the model writes is <seed:tool_call><function=f><parameter=a>1</parameter></function>
</seed:tool_call>, with a line break after each tag but those next to a value.
"""

from dataclasses import replace

from gateway.chat.families import qwen3_coder
from gateway.chat.families.tagged_calls import detector_of, parser_of
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.tagged_calls import TaggedCalls

TAGS = replace(
    qwen3_coder.TAGS,
    has_line_breaks=False,
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
)
THINK = "<seed:think>"

SEED_OSS = ToolCallFormat(
    "seed_oss",
    parser_of(TAGS),
    lambda template: TAGS.opening in template,
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
    ),
    openings=(TAGS.opening, TAGS.head_start),
    is_call=detector_of(TAGS),
)
REASONING = ReasoningFormat(
    "seed_oss", lambda template: THINK in template, opening=THINK, closing="</seed:think>"
)
