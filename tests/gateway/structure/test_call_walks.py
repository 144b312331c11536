"""Random walks through answers that may hold calls: what is begun is valid, streamed and whole.

Random schemas, each format of calls, with markers that are tokens and that are text. An answer is
walked within the masks, parsed as the gateway parses it, in one piece and in many, and its calls
are checked by another implementation of JSON Schema. PAGEWIRE_ALL_SCHEMAS=1 walks 200 schemas for
each format and kind of answer, not 12.
"""

import json
import os
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import pytest
import tokenizers

from default_model.folder import ensure
from gateway.chat import formats
from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.families import deepseek, glm, harmony, kimi
from gateway.chat.parts import Reply, reply_of
from gateway.errors.request_errors import RequestError
from gateway.structure.calls import AnyStructure
from gateway.structure.structure import JsonSchema
from tests.gateway.structure.walks import walk
from tests.schemas import make_schema
from wire.grammar import Vocabulary, new_matcher, read_vocabulary

EOS, MAX_TOKENS = 2, 500
NUM_SCHEMAS = 200 if os.environ.get("PAGEWIRE_ALL_SCHEMAS") else 12
FORM = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
MARKERS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
MARKERS += [*glm.TOKENS, *kimi.TOKENS, *harmony.TOKENS, *deepseek.TOKENS]
MARKERS += [*formats.LFM2.shown_tokens, *formats.GEMMA4.shown_tokens]
MARKERS += [*formats.MINIMAX_M2.shown_tokens, *formats.SEED_OSS.shown_tokens]
HELD = [name for name, form in formats.FORMATS.items() if form.writing is not None]
NAMES = ("lookup", "look", 'say "é"')
# That write no other names.
PLAIN = {*HELD} - {"hermes", "llama3_json", "mistral"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A vocabulary, its markers, and how a model writes calls."""

    vocabulary: Vocabulary
    tokenizer: tokenizers.Tokenizer
    chat_format: ChatFormat


@cache
def read(has_tokens: bool) -> tuple[Vocabulary, tokenizers.Tokenizer]:
    """Most of a second; the same for all formats."""
    tokenizer = tokenizers.Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    if has_tokens:
        tokenizer.add_special_tokens(MARKERS)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return read_vocabulary(tokenizer.to_str(), size, [EOS]), tokenizer


def setting(name: str, has_tokens: bool) -> Setting:
    vocabulary, tokenizer = read(has_tokens)
    ids = {text: tokenizer.token_to_id(text) for text in MARKERS} if has_tokens else {}
    reasoning = formats.REASONING["harmony"] if name == "harmony" else None
    chat_format = ChatFormat(True, formats.FORMATS[name], reasoning, ids)
    return Setting(vocabulary, tokenizer, chat_format)


def conversation_of(name: str, schema: Any, *, is_strict: bool) -> Conversation:
    wrapped = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    closed: dict[str, Any] = wrapped | {"additionalProperties": False}
    if isinstance(schema, dict) and "$defs" in schema:
        closed["$defs"] = schema.pop("$defs")
    names = NAMES[: 2 if name in PLAIN else 3]
    tools = tuple(Tool(name, None, closed, is_strict) for name in names)
    return Conversation((Message("user", "Hello"),), tools)


def parse(
    chat_format: ChatFormat, chat: Conversation, structure: AnyStructure, pieces: list[str]
) -> Reply:
    reader = chat_format.reader(chat, "", structure)
    assert reader is not None
    parts = [part for piece in pieces for part in reader.push(piece, is_last=False)]
    return reply_of([*parts, *reader.push("", is_last=True)])


def cut(text: str, dice: random.Random) -> list[str]:
    """The text in random pieces."""
    places = sorted(dice.randrange(len(text) + 1) for _ in range(9))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def openings(name: str, *, has_form: bool, has_tokens: bool) -> list[str]:
    """Beginnings of answers; all but the last may hold no call."""
    form = '{"' if name != "harmony" else "<|channel|>final<|message|>"
    if name == "harmony":
        named = "<|channel|>commentary to=functions."
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        before = " to=functions.look<|channel|>commentary"
        return [form if has_form else "", named, thought + named, before]
    writing = formats.FORMATS[name].writing
    assert writing is not None
    if has_form:
        return [form, writing.opening, writing.opening]
    if writing.begins_bare and not has_tokens:
        return ["", '{"']
    return ["", writing.opening, f"Let me see. {writing.opening}"]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("has_form", [False, True], ids=["strict", "form"])
@pytest.mark.parametrize("name", HELD)
def test_a_call_that_is_begun_is_valid_and_an_answer_is_calls_or_the_form(
    name: str, has_form: bool, has_tokens: bool
) -> None:
    where, dice = setting(name, has_tokens), random.Random(f"{name} {has_form} {has_tokens}")
    asked = JsonSchema("response_format", FORM | {"additionalProperties": False})
    if not has_tokens and (name == "harmony" or (name == "llama3_json" and has_form)):
        with pytest.raises(RequestError):  # nothing else tells calls from text, or from a form
            chat = conversation_of(name, True, is_strict=True)
            held = where.chat_format.structure(chat, asked if has_form else None)
            assert held is not None
            held.to_grammar()
        return
    encode = where.tokenizer.encode
    closing = [EOS, *(where.tokenizer.token_to_id(char) for char in '"}],0123456789</>')]
    closing += [where.tokenizer.token_to_id(text) for text in MARKERS if has_tokens]
    free, *called = openings(name, has_form=has_form, has_tokens=has_tokens)
    num_ended = num_calls = num_forms = 0
    for seed in range(NUM_SCHEMAS):
        chat = conversation_of(name, make_schema(seed), is_strict=not has_form)
        structure = where.chat_format.structure(chat, asked if has_form else None)
        assert structure is not None
        begin = dice.choice(called) if seed % 4 else free
        matcher = new_matcher(where.vocabulary, structure.to_grammar())
        begun = encode(begin, add_special_tokens=False).ids
        assert matcher.consume_tokens(begun), matcher.get_error()
        rest = walk(matcher, closing, dice, detours=0.4, most=MAX_TOKENS)
        if rest is None:
            continue
        num_ended += 1
        text = where.tokenizer.decode([*begun, *rest], skip_special_tokens=False)
        whole = parse(where.chat_format, chat, structure, [text])
        pieces = parse(where.chat_format, chat, structure, cut(text, dice))
        assert [(c.name, c.arguments) for c in pieces.tool_calls] == [
            (c.name, c.arguments) for c in whole.tool_calls
        ]
        assert (pieces.content, pieces.reasoning) == (whole.content, whole.reasoning)
        # All tools have one schema. It is compiled once, not checked anew for every call.
        validator = jsonschema.Draft202012Validator(chat.tools[0].parameters)
        for call in whole.tool_calls:
            num_calls += 1
            assert call.name in [tool.name for tool in chat.tools]
            validator.validate(json.loads(call.arguments))
        assert whole.tool_calls or begin == free, text
        if has_form:
            assert bool(whole.tool_calls) != bool(whole.content), text
            num_forms += not whole.tool_calls
            if whole.content:
                jsonschema.validate(json.loads(whole.content), FORM)
    assert num_ended > NUM_SCHEMAS // 3 and num_calls > NUM_SCHEMAS // 5, (num_ended, num_calls)
    assert bool(num_forms) == has_form


@pytest.mark.parametrize("name", HELD)
def test_text_without_a_call_stays_free(name: str) -> None:
    for has_tokens in (True, False):
        if name == "harmony" and not has_tokens:
            continue
        where = setting(name, has_tokens)
        chat = conversation_of(name, True, is_strict=True)
        structure = where.chat_format.structure(chat, None)
        assert structure is not None
        for text in ("", "Plain text.\n\nWith <b>tags</b>, é 日本語 and [1, {2}].", "<tool", "a {"):
            matcher = new_matcher(where.vocabulary, structure.to_grammar())
            assert matcher.consume_tokens(where.tokenizer.encode(text).ids)
            assert matcher.is_accepting(), text
