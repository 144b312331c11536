"""Calls as strict templates take them: with ids of nine letters and digits, and one a turn."""

from dataclasses import replace

import pytest

from gateway.chat.call_turns import call_forms, one_call_a_turn, with_short_ids
from gateway.chat.conversation import Conversation, Message, ToolCall
from gateway.chat.template import LONG_CHARACTERS, ChatTemplate
from gateway.chat.turns import forms
from gateway.errors.request_errors import RequestError

USER = Message("user", "Hello")
CALLS = tuple(ToolCall(f"toolu_{number}", "look", "{}") for number in range(3))
CALLING = Message("assistant", "Now.", reasoning="Hm.", tool_calls=CALLS)
RESULTS = tuple(Message("tool", f"seen {call.id}", tool_call_id=call.id) for call in CALLS)
TURNS = (USER, CALLING, *RESULTS, USER)

STRICT = """\
{%- if tools %}tools {% endif %}
{%- for message in messages %}{{ message.role[0] }}
{%- for call in message.tool_calls or [] %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single calls') }}{% endif %}
{%- if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}={{ call.id }}
{%- endfor %}{% if message.tool_call_id %}:{{ message.tool_call_id }}{% endif %} {% endfor %}"""


def test_ids_are_short_alike_for_calls_and_results_and_each_is_another() -> None:
    short = with_short_ids(TURNS)
    ids = [call.id for call in short[1].tool_calls]
    assert [message.tool_call_id for message in short[2:5]] == ids
    assert len(set(ids)) == 3 and all(len(one) == 9 and one.isalnum() for one in ids)
    assert with_short_ids(short) == short
    assert short == with_short_ids(TURNS)  # the same each time, as the prefix cache needs


def test_each_call_of_a_row_has_a_turn_and_its_result_after_it() -> None:
    single = one_call_a_turn(TURNS)
    roles = [message.role for message in single]
    assert roles == ["user", *["assistant", "tool"] * 3, "user"]
    for call, calling, result in zip(CALLS, single[1:7:2], single[2:7:2], strict=True):
        assert calling.tool_calls == (call,) and result.tool_call_id == call.id
    assert [message.content for message in single[1:7:2]] == ["Now.", None, None]


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1, 2)])
def test_no_result_is_lost(missing: tuple[int, ...]) -> None:
    results = [result for index, result in enumerate(RESULTS) if index not in missing]
    stray = Message("tool", "stray", tool_call_id="none")
    single = one_call_a_turn((USER, CALLING, *results, stray))
    assert sorted(m.content or "" for m in single if m.role == "tool") == sorted(
        m.content or "" for m in (*results, stray)
    )


def test_turns_that_every_template_takes_have_one_form() -> None:
    assert list(call_forms((USER, Message("assistant", "Hi.")))) == [
        (USER, Message("assistant", "Hi."))
    ]


def test_a_template_that_refuses_both_gets_both() -> None:
    text = ChatTemplate(STRICT, {}).render(Conversation(TURNS))
    roles = [word[0] for word in text.split()]
    assert roles == ["u", "a", "t", "a", "t", "a", "t", "u"]


def test_what_a_user_says_after_a_result_stays_where_users_take_turns() -> None:
    alternating = """\
{%- if tools %}tools {% endif %}
{%- set ns = namespace(n=0) %}{% for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
    text = ChatTemplate(alternating, {}).render(Conversation(TURNS))
    assert text.count("user: ") == 1
    assert "tool: seen toolu_2\n\nHello" in text


def test_forms_that_are_near_in_every_way_come_before_those_far_in_one() -> None:
    call = ToolCall("call_1", "look", "{}")
    messages = (
        Message("system", "Be brief."),
        Message("user", "Look."),
        Message("assistant", None, tool_calls=(call, replace(call, id="call_2"))),
        Message("tool", "a", tool_call_id="call_1"),
        Message("tool", "b", tool_call_id="call_2"),
    )
    found = list(forms(messages))
    assert found[0].messages == messages
    shortened = [is_short(form.messages) for form in found]
    alone = [max(len(message.tool_calls) for message in form.messages) == 1 for form in found]
    assert shortened.index(True) < 4
    assert [a and b for a, b in zip(shortened, alone, strict=True)].index(True) < 12
    assert len({(form.messages, form.arguments) for form in found}) == len(found)


def is_short(messages: tuple[Message, ...]) -> bool:
    return all(len(call.id) == 9 for message in messages for call in message.tool_calls)


@pytest.mark.parametrize("num_turns", [2, 600])
def test_long_turns_are_rendered_whole_in_the_form_that_is_taken_alone(num_turns: int) -> None:
    text = "word " * (LONG_CHARACTERS // num_turns)
    turns = TURNS + num_turns * (Message("assistant", text), USER)
    template = ChatTemplate(STRICT + "{{ messages | map(attribute='content') | join }}", {})
    whole = template.render(Conversation(turns))
    assert whole.count("word") == text.count("word") * num_turns


def test_long_turns_that_no_form_mends_are_refused_in_the_templates_words() -> None:
    template = ChatTemplate("{{ raise_exception('never') }}", {})
    turns = (Message("user", "x" * (2 * LONG_CHARACTERS)),)
    with pytest.raises(RequestError, match="never"):
        template.render(Conversation(turns))
