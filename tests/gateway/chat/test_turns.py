"""Templates that refuse or drop some turns get the same conversation in a form that they take."""

import json

import jinja2
import pytest

from gateway.chat.conversation import Conversation, Message, Rendering, Tool, ToolCall
from gateway.chat.template import ChatTemplate
from gateway.errors.request_errors import RequestError

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
# One turn of the system, at the start, or none.
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}<system>"
    "{{ messages[0].content }}\n{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
NO_SYSTEM = ALTERNATING.replace(
    "<system>{{ messages[0].content }}\n",
    "{{ raise_exception('System role not supported') }}",
)
DROPPING = (
    "{% for m in messages %}{% if loop.first or m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content | trim }}\n{% endif %}{% endfor %}{# developer #}"
)
LOOPING = (
    "{{ tools }}<tool_call><parameter={% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for name, value in c.function.arguments|items %}"
    "[{{ name }}: {{ value }}]{% endfor %}{% endfor %}{{ '\n' }}{% endfor %}"
)
ADDING = LOOPING.replace(
    "{% for name, value in c.function.arguments|items %}[{{ name }}: {{ value }}]{% endfor %}",
    "{{ '```json\\n' + c.function.arguments + '\\n```' }}",
)

SYSTEM, DEVELOPER = Message("system", "One."), Message("developer", "Two.")
USER, ANSWER, LATE = Message("user", "Hi"), Message("assistant", "Yes?"), Message("system", "Late.")


def render(source: str, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return ChatTemplate(source, {}).render(Conversation(messages, tools))


@pytest.mark.parametrize("source", [EACH, FIRST_ALONE, ALTERNATING])
@pytest.mark.parametrize("leading", [(SYSTEM, DEVELOPER), (DEVELOPER, SYSTEM)])
def test_instructions_at_the_start_are_one_turn_of_the_system(
    source: str, leading: tuple[Message, ...]
) -> None:
    joined = "\n\n".join(message.content or "" for message in leading)
    assert render(source, *leading, USER) == f"<system>{joined}\n<user>Hi\n"


def test_a_template_that_reads_the_first_turn_alone_loses_no_instruction() -> None:
    text = render(DROPPING, DEVELOPER, DEVELOPER, USER, ANSWER, LATE)
    assert text == "<developer>Two.\n\nTwo.\n<user>Hi\n<assistant>Yes?\n<user>Late.\n"


@pytest.mark.parametrize("late", [LATE, Message("developer", "Late.")])
def test_late_instructions_are_the_users_where_the_template_refuses_them(late: Message) -> None:
    assert render(EACH, USER, late) == "<user>Hi\n<system>Late.\n"
    text = render(FIRST_ALONE, SYSTEM, USER, ANSWER, late, USER)
    assert text == "<system>One.\n<user>Hi\n<assistant>Yes?\n<user>Late.\n<user>Hi\n"


def test_neighbouring_turns_of_the_user_are_joined_where_roles_must_alternate() -> None:
    text = render(ALTERNATING, SYSTEM, USER, LATE, USER, ANSWER, LATE)
    assert text == "<system>One.\n<user>Hi\n\nLate.\n\nHi\n<assistant>Yes?\n<user>Late.\n"


def test_a_template_without_a_system_is_told_in_the_users_first_turn() -> None:
    assert render(NO_SYSTEM, SYSTEM, DEVELOPER, USER) == "<user>One.\n\nTwo.\n\nHi\n"
    told = render(NO_SYSTEM, USER, tools=(Tool("f"),))
    assert told.startswith("<user>You can call") and told.endswith("\n\nHi\n")


def test_results_told_in_words_alternate_with_the_calls() -> None:
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))
    results = (Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b"))
    called = Message("assistant", None, tool_calls=calls)
    text = render(ALTERNATING, USER, called, *results, tools=(Tool("f"),))
    assert text.count("<user>") == 2
    assert text.index("\n1\n") < text.index("\n2\n")


def test_what_no_form_helps_with_is_refused_in_the_templates_own_words() -> None:
    with pytest.raises(RequestError, match="must alternate"):
        render(ALTERNATING, ANSWER, ANSWER)


@pytest.mark.parametrize("arguments", ['{"a": "x', "[1]", "three", '{"a": 1e999}', "[" * 100_000])
def test_a_call_that_was_cut_off_is_an_object_where_the_template_wants_one(arguments: str) -> None:
    whole, cut = ToolCall("a", "f", '{"b": 1}'), ToolCall("b", "f", arguments)
    text = render(LOOPING, USER, Message("assistant", None, tool_calls=(whole, cut)))
    assert text.endswith(f"<assistant>[b: 1][INVALID_JSON: {arguments}]\n")


def test_blank_arguments_are_none() -> None:
    called = Message("assistant", None, tool_calls=(ToolCall("a", "f", " \n"),))
    assert render(LOOPING, USER, called).endswith("<assistant>\n")


def test_a_template_that_adds_to_arguments_gets_them_as_text() -> None:
    called = Message("assistant", None, tool_calls=(ToolCall("a", "f", '{"é": 1}'),))
    assert render(ADDING, USER, called).endswith('<assistant>```json\n{"é": 1}\n```\n')


def test_results_come_in_the_order_of_their_calls() -> None:
    def result(of: str | None) -> Message:
        return Message("tool", str(of), tool_call_id=of)

    def called(*ids: str) -> Message:
        return Message("assistant", "", tool_calls=tuple(ToolCall(one, "f", "{}") for one in ids))

    source = "{{ tools }}<tool_call><parameter={% for m in messages %} {{ m.content }}{% endfor %}"
    turns = [
        *(called("a"), called("b", "c"), result("c"), result("x"), result("a"), result(None)),
        *(result("b"), USER, result("q"), result("p"), called("p", "q"), result("q"), result("p")),
        *(called("z"), result("p"), result("z"), result("a")),
    ]
    text = render(source, *turns)
    assert text.rpartition("=")[2].split() == [
        *("a", "b", "c", "x", "None", "Hi", "q", "p", "p", "q", "z", "p", "a")
    ]


def test_a_last_turn_can_be_gone_on_with_in_every_form() -> None:
    rendering = Rendering(continue_final_message=True)
    messages = (SYSTEM, USER, LATE, Message("assistant", "Well, "))
    for source in (EACH, FIRST_ALONE, ALTERNATING, NO_SYSTEM):
        text = ChatTemplate(source, {}).render(Conversation(messages, rendering=rendering))
        assert text.endswith("<assistant>Well, ")


def test_a_template_with_calls_in_a_form_of_its_own_can_be_told_in_words() -> None:
    template = ChatTemplate("{{ tools | tojson }}<|action|>" + EACH + "{# system #}", {})
    template = template.told_in_words()
    called = Message("assistant", None, tool_calls=(ToolCall("a", "f", "{}"),))
    text = template.render(
        Conversation((USER, called, Message("tool", "7", tool_call_id="a")), (Tool("f"),))
    )
    assert text.startswith("null<|action|><system>You can call")
    assert f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {}})}\n</tool_call>" in text
    assert text.endswith("<user><tool_response>\n7\n</tool_response>\n")


@pytest.mark.parametrize("size", [1, 1 << 21])
def test_long_turns_that_a_template_refuses_are_rendered_whole_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Refusing:
        def render(self, messages: list[dict[str, object]], **settings: object) -> str:
            sizes.append(sum(len(str(message["content"])) for message in messages))
            raise jinja2.TemplateError("never")

    template = ChatTemplate(EACH + "{{ tools }}", {})
    monkeypatch.setattr(template, "_plain", Refusing())
    calls = (ToolCall("a", "f", "{"), ToolCall("b", "f", "{}"))
    turns = (DEVELOPER, Message("user", "x" * size), Message("assistant", "", tool_calls=calls))
    with pytest.raises(RequestError, match="never"):
        template.render(Conversation((*turns, LATE, USER)))
    assert 8 <= len(sizes) <= 100
    assert sum(shown >= size > 1 for shown in sizes) <= 1
