"""Reasoning of the newer families, and conversations in their templates' forms."""

import json
from functools import cache
from typing import Any

import pytest
import tokenizers

from default_model.folder import ensure
from gateway.chat import formats
from gateway.chat.answer import AUTO, ChatFormat, choose
from gateway.chat.conversation import Conversation, Message, Rendering, Tool, ToolCall
from gateway.chat.parts import Reply, reply_of
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.template import ChatTemplate
from gateway.errors.request_errors import RequestError
from gateway.structure.structure import JsonSchema
from gateway.structure.thinking import ThoughtFirst
from tests.gateway.chat.call_texts import deepseek_v31, gemma4, quoted, token
from wire.grammar import Vocabulary, new_matcher, read_vocabulary

USER = Message("user", "Hi")
CHAT = Conversation((USER,), (Tool("f"),))
# The marker that opens reasoning, as the model writes it, and the one that ends it.
MARKED = {
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
CALLS = {
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n"
    "</seed:tool_call>",
    "gemma4": gemma4("f{a:1}"),
}


def read(name: str, pieces: list[str], prompt: str = "") -> tuple[Reply, int]:
    chat_format = ChatFormat(True, formats.FORMATS[name], formats.REASONING[name])
    answer = chat_format.reader(CHAT, prompt, None)
    assert answer is not None and answer.thought is not None
    parts = []
    for piece in pieces:
        parts += answer.push(piece, is_last=False)
        answer.thought.add(piece, len(piece))
    return reply_of([*parts, *answer.push("", is_last=True)]), answer.thought.count


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_split_from_the_answer_wherever_it_is_cut(name: str, is_open: bool) -> None:
    opening, closing = MARKED[name]
    prompt = opening if is_open else "user\n"
    begin = "" if is_open else opening
    for text, reasoning, content, num_calls in (
        (f"{begin}Hm, <b>.\n{closing}\nHello", "Hm, <b>.", "Hello", 0),
        (f"{begin}{closing}{CALLS[name]}", None, "", 1),
        (f"{begin}Hm. {CALLS[name]} {closing} Done", "Hm.", "Done", 1),  # a call ends it
        (f"{begin}Cut {closing[:-1]}", f"Cut {closing[:-1]}", "", 0),
    ):
        whole, count = read(name, [text], prompt)
        assert (whole.reasoning, whole.content) == (reasoning, content), text
        assert len(whole.tool_calls) == num_calls
        for cut in range(len(text) + 1):
            reply, _ = read(name, [text[:cut], text[cut:]], prompt)
            assert (reply.reasoning, reply.content) == (reasoning, content), (text, cut)
        if not num_calls:
            assert read(name, [*text], prompt)[1] == count


@pytest.mark.parametrize("name", MARKED)
def test_an_answer_after_a_prompt_that_ends_the_reasoning_is_content(name: str) -> None:
    opening, closing = MARKED[name]
    reply, count = read(name, ["Hello"], opening + closing)
    assert (reply.reasoning, reply.content, count) == (None, "Hello", 0)


@pytest.mark.parametrize("name", MARKED)
def test_a_chat_template_tells_the_reasoning(name: str) -> None:
    chosen = choose(ChatTemplate("{{ tools }}" + "".join(MARKED[name]), {}), AUTO, AUTO)
    assert chosen.reasoning is formats.REASONING[name]
    assert choose(ChatTemplate("x", {}), AUTO, name).reasoning is formats.REASONING[name]
    shown = chosen.shown_tokens(CHAT)
    assert chosen.reasoning.opening in shown and chosen.reasoning.closing in shown


@cache
def known(has_tokens: bool) -> tuple[Vocabulary, tokenizers.Tokenizer]:
    """A vocabulary, with or without the markers as tokens of their own."""
    tokenizer = tokenizers.Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    if has_tokens:
        forms = [formats.REASONING[name] for name in MARKED]
        tokenizer.add_special_tokens([text for one in forms for text in (one.opening, one.closing)])
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return read_vocabulary(tokenizer.to_str(), size, [2]), tokenizer


def accepts(form: ReasoningFormat, text: str, *, has_tokens: bool, budget: int | None) -> bool:
    """True if a grammar of the reasoning, and of an object if no budget is given, has the text."""
    vocabulary, tokenizer = known(has_tokens)
    markers = (form.opening, form.closing) if has_tokens else ()
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
    chat = Conversation((USER,), max_reasoning_tokens=budget)
    asked = None if budget else JsonSchema("response_format", {"type": "object"})
    structure = ChatFormat(False, None, form, ids).with_thought(chat, "", asked)
    assert isinstance(structure, ThoughtFirst)
    matcher = new_matcher(vocabulary, structure.to_grammar())
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", MARKED)
def test_a_form_comes_after_the_reasoning(name: str) -> None:
    form, (opening, closing) = formats.REASONING[name], MARKED[name]
    for has_tokens in (True, False):
        for text in (f"{opening}Hm {{}}.{closing}{{}}", f"{opening}{closing}\n\n{{}}", "{}"):
            assert accepts(form, text, has_tokens=has_tokens, budget=None), (text, has_tokens)
        for text in (f"{opening}Hm.", f"{opening}Hm.{closing}No.", f"Hm.{closing}{{}}"):
            assert not accepts(form, text, has_tokens=has_tokens, budget=None), (text, has_tokens)


@pytest.mark.parametrize("name", MARKED)
def test_a_budget_bounds_the_reasoning(name: str) -> None:
    form, (opening, closing) = formats.REASONING[name], MARKED[name]
    assert accepts(form, f"{opening}Hm.{closing} So.", has_tokens=True, budget=9)
    assert accepts(form, "Plain text", has_tokens=True, budget=9)
    assert not accepts(form, f"{opening}{'Hm. ' * 20}{closing}", has_tokens=True, budget=9)


# What each family's template makes of a call, without the rest of it.
TEMPLATES = {
    # Adds the arguments to a text, which no object can be added to.
    "deepseek_v31": "{{ 'BEGIN' + call.function.name + 'SEP' + call.function.arguments }}".replace(
        "BEGIN", token("tool call begin")
    ).replace("SEP", token("tool sep")),
    "lfm2": "<|tool_call_start|>[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}="
    "{{ \"'\" + value + \"'\" if value is string else value }}{{ ', ' if not loop.last }}"
    "{% endfor %})]",
    "gemma4": "<|tool_call>call:{{ call.function.name + '{' }}"
    "{%- for name, value in call.function.arguments | dictsort %}{{ name }}:"
    "{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}"
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ call.function.name }}">\n'
    "{% for name, value in call.function.arguments | items %}"
    '<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n</minimax:tool_call>",
}
ARGUMENTS = {"city": "Paris", "days": 3}
RENDERED = {
    "deepseek_v31": deepseek_v31(("f", json.dumps(ARGUMENTS))),
    "lfm2": "<|tool_call_start|>[f(city='Paris', days=3)]",
    "gemma4": gemma4(f"f{{city:{quoted('Paris')},days:3}}"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Paris</parameter>'
    '\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_earlier_call_is_rendered_in_the_templates_own_form_and_read_again(name: str) -> None:
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        + TEMPLATES[name]
        + "{% endfor %}{% endfor %}"
    )
    call = ToolCall("call_1", "f", json.dumps(ARGUMENTS))
    chat = Conversation((USER, Message("assistant", None, tool_calls=(call,))))
    text = ChatTemplate(source, {}).render(chat)
    assert text in RENDERED[name]
    schema: Any = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    again = Conversation((USER,), (Tool("f", None, schema),))
    reader = ChatFormat(True, formats.FORMATS[name]).reader(again, "", None)
    assert reader is not None
    (made,) = reply_of(reader.push(RENDERED[name], is_last=True)).tool_calls
    assert (made.name, json.loads(made.arguments)) == ("f", ARGUMENTS)


def test_the_first_templates_of_lfm2_are_known_by_their_list_of_tools() -> None:
    template = ChatTemplate("<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>", {})
    chosen = choose(template, AUTO, AUTO)
    assert chosen.tool_calls is formats.LFM2 and not chosen.tells_in_words


def test_the_effort_reaches_the_switch_of_deepseek() -> None:
    source = "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
    for effort, text in (("high", "True"), ("none", "False")):
        chat = Conversation((USER,), rendering=Rendering(reasoning_effort=effort))
        assert ChatTemplate(source, {}).render(chat) == text


@pytest.mark.parametrize("marker", ["[THINK]", "<seed:think>"])
def test_a_model_that_thinks_always_cannot_be_kept_from_it(marker: str) -> None:
    asked = Conversation((USER,), rendering=Rendering(reasoning_effort="none"))
    with pytest.raises(RequestError, match="reasoning_effort: this model thinks always"):
        ChatTemplate("{{ messages }}" + marker, {}).render(asked)
