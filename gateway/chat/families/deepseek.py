"""Calls of the DeepSeek V3 family: JSON arguments between tokens.

| name         | a call, between the tokens of its begin and its end                       |
| ------------ | ------------------------------------------------------------------------- |
| deepseek_v3  | function, a separator, its name and a block of JSON in Markdown           |
| deepseek_v31 | its name, a separator and JSON                                            |

Both parsers read both.
"""

import re

from gateway.chat.families.sections import Section, detector_of, parser_of
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.json_calls import SectionCalls

BAR = "\uff5c"  # as wide as the characters of Chinese
SEPARATOR = f"<{BAR}tool▁sep{BAR}>"
KIND, BLOCK, BLOCK_END = "function", "```json", "```"
_NAME = r"[^\s<{`]+"  # so that no longer text can make another name of it
SECTION = Section(
    f"<{BAR}tool▁calls▁begin{BAR}>",
    f"<{BAR}tool▁calls▁end{BAR}>",
    f"<{BAR}tool▁call▁begin{BAR}>",
    f"<{BAR}tool▁call▁end{BAR}>",
    re.compile(
        rf"\s*(?:{KIND}{SEPARATOR}(?=\s*{_NAME}\s*{BLOCK}))?"
        rf"\s*(?P<name>{_NAME})\s*(?:{SEPARATOR}|{BLOCK})\s*(?=\{{)"
    ),
    arguments_end=BLOCK_END,
)
TOKENS = (
    *(SECTION.opening, SECTION.closing),
    *(SECTION.call_opening, SECTION.call_closing),
    SEPARATOR,
)


def _is_v3(template: str) -> bool:
    return SECTION.opening in template and BLOCK in template


def _writing(
    before_name: tuple[str, ...], after_name: tuple[str, ...], after_arguments: tuple[str, ...]
) -> SectionCalls:
    return SectionCalls(
        SECTION.opening,
        SECTION.closing,
        SECTION.call_opening,
        SECTION.call_closing,
        before_name=before_name,
        after_name=after_name,
        after_arguments=after_arguments,
    )


DEEPSEEK_V3 = ToolCallFormat(
    "deepseek_v3",
    parser_of(SECTION),
    _is_v3,
    shown_tokens=TOKENS,
    writing=_writing((KIND, SEPARATOR), (f"\n{BLOCK}\n",), (f"\n{BLOCK_END}",)),
    openings=(SECTION.opening,),
    is_call=detector_of(SECTION),
)
DEEPSEEK_V31 = ToolCallFormat(
    "deepseek_v31",
    parser_of(SECTION),
    lambda template: SECTION.opening in template and not _is_v3(template),
    shown_tokens=TOKENS,
    writing=_writing((), (SEPARATOR,), ()),
    openings=(SECTION.opening,),
    is_call=detector_of(SECTION),
)
