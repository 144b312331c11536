"""Calls of DeepSeek V3.2 and V4: tags that hold a token, and say which argument is a text.

What the model writes is, with the token in each tag, <function_calls><invoke name="f"><parameter
name="a" string="false">1</parameter></invoke></function_calls>, with a line break after each tag
but those next to a value. V4 calls the outer tag tool_calls.
"""

import re

from gateway.chat.families.deepseek import BAR
from gateway.chat.families.tagged_calls import detector_of, parser_of
from gateway.chat.families.value_end import Tags
from gateway.chat.tool_format import ToolCallFormat

TOKEN = f"{BAR}DSML{BAR}"


def _tags(block: str) -> Tags:
    return Tags(
        head=re.compile(rf'<{TOKEN}invoke name="([^">\n]*)">'),
        head_start=f'<{TOKEN}invoke name="',
        key=re.compile(rf'<{TOKEN}parameter name="([^">\n]*)" string="(?P<is_text>true|false)">'),
        key_start=f'<{TOKEN}parameter name="',
        value_end=f"</{TOKEN}parameter>",
        call_end=f"</{TOKEN}invoke>",
        has_line_breaks=False,
        opening=f"<{TOKEN}{block}>",
        closing=f"</{TOKEN}{block}>",
    )


V32, V4 = _tags("function_calls"), _tags("tool_calls")


def _is_v32(template: str) -> bool:
    # Templates put the token into the tags, so that none of them is there as a whole.
    return TOKEN in template and "function_calls>" in template


DEEPSEEK_V32 = ToolCallFormat(
    "deepseek_v32",
    parser_of(V32),
    _is_v32,
    shown_tokens=(TOKEN,),
    openings=(V32.opening, V32.head_start),
    is_call=detector_of(V32),
)
DEEPSEEK_V4 = ToolCallFormat(
    "deepseek_v4",
    parser_of(V4),
    lambda template: TOKEN in template and not _is_v32(template),
    shown_tokens=(TOKEN,),
    openings=(V4.opening, V4.head_start),
    is_call=detector_of(V4),
)
