"""The table of families and their formats in the documentation, row by row."""

import re
from pathlib import Path

import pytest

from gateway.chat import formats
from gateway.chat.answer import AUTO, choose
from gateway.chat.template import ChatTemplate
from tests.gateway.chat.call_texts import DSML, deepseek_v3, deepseek_v31

DOCUMENT = Path(__file__).parents[3] / "docs/tools-and-reasoning.md"
WORDS = "told in words"
# What the family's own chat template spells, by the first word or two of the row.
SPELLED = {
    "Qwen2.5": '{{ tools }}<tool_call>\n{"name": x, "arguments": y}\n</tool_call><think>',
    "Qwen3-Coder": "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>\n</tool_call><think>",
    "gpt-oss": "{{ tools }}<|channel|>analysis<|message|>",
    "Gemma 4": "{{ tools }}<|tool_call>call:<tool_call|><|channel>thought<channel|>",
    "Gemma 3": "{{ messages }}",
    "Mistral": "{{ tools }}[TOOL_CALLS][ARGS][THINK][/THINK]",
    "Llama 3.x": '{{ tools }}{"name": f, "parameters": {}}<|eot_id|>',
    "LFM2": "{{ tools }}<|tool_call_start|>[]<|tool_call_end|><think></think>",
    "GLM-4.5": "{{ tools }}<tool_call>f<arg_key>a</arg_key><arg_value><think>",
    "DeepSeek V3": "{{ tools }}<think>" + deepseek_v3(("f", "")),
    "DeepSeek V3.1": "{{ tools }}<think></think>" + deepseek_v31(("f", "")),
    "DeepSeek V3.2": "{{ tools }}<{{ dsml }}function_calls><think>{# " + DSML + " #}",
    "DeepSeek V4": "{{ tools }}<{{ dsml }}tool_calls><think>{# " + DSML + " #}",
    "Kimi K2": "{{ tools }}<|tool_calls_section_begin|><think>",
    "MiniMax-M2": "{{ tools }}<minimax:tool_call>{{ '<invoke name=\"' }}<think>",
    "Seed-OSS": "{{ tools }}<seed:tool_call><function=f><parameter=a><seed:think>",
    "any other": "{{ tools }}<unknown_calls>",
}


def rows() -> dict[str, tuple[str, str]]:
    """Calls and reasoning by family."""
    text = DOCUMENT.read_text().partition("## Which family has which format")[2]
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", text, re.MULTILINE)
    table = {family: (calls, reasoning.strip()) for family, calls, reasoning in found}
    del table["family"], table["---"]
    return table


def spelled(family: str) -> str:
    """The template of a family."""
    return SPELLED[max((name for name in SPELLED if family.startswith(name)), key=len)]


@pytest.mark.parametrize("family", rows())
def test_a_familys_template_chooses_the_formats_of_its_row(family: str) -> None:
    calls, reasoning = rows()[family]
    chosen = choose(ChatTemplate(spelled(family), {}), AUTO, AUTO)
    assert chosen.tool_calls is not None
    assert chosen.tells_in_words == (calls == WORDS)
    assert calls in (WORDS, f"`{chosen.tool_calls.name}`")
    first = re.match(r"`(\w+)`", reasoning)
    assert (chosen.reasoning and chosen.reasoning.name) == (first and first[1])


def test_each_family_has_a_row_and_each_format_a_family() -> None:
    table = rows()
    assert len(table) == len(SPELLED) == len({spelled(family) for family in table})
    named = {
        name for row in table.values() for cell in row for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == formats.FORMATS.keys() | formats.REASONING.keys()
