"""Calls of the Kimi K2 family: JSON arguments between tokens, under the id of the call."""

import re

from gateway.chat.families.sections import Section, detector_of, parser_of
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.json_calls import SectionCalls

ARGUMENTS = "<|tool_call_argument_begin|>"
SECTION = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    re.compile(
        rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*{re.escape(ARGUMENTS)}\s*(?=\{{)"
    ),
)
TOKENS = (
    *(SECTION.opening, SECTION.closing),
    *(SECTION.call_opening, SECTION.call_closing),
    ARGUMENTS,
)

KIMI = ToolCallFormat(
    "kimi",
    parser_of(SECTION),
    lambda template: SECTION.opening in template,
    shown_tokens=TOKENS,
    writing=SectionCalls(
        SECTION.opening,
        SECTION.closing,
        SECTION.call_opening,
        SECTION.call_closing,
        before_name=("functions.",),
        after_name=(":", ARGUMENTS),
        is_numbered=True,
    ),
    openings=(SECTION.opening,),
    is_call=detector_of(SECTION),
)
