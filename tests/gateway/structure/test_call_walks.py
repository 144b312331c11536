"""Random walks through answers that may hold calls: what is begun is valid, streamed and whole.

200 random schemas, each format of calls in turn, with markers that are tokens and that are text. An
answer is walked within the masks, parsed as the gateway parses it, in one piece and in many, and
its calls are checked by another implementation of JSON Schema.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from default_model.folder import ensure
from gateway.chat import formats
from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.parts import Reply, reply_of
from gateway.structure.structure import JsonSchema
from tests.schemas import make_schema
from wire.grammar import Vocabulary, new_matcher, read_vocabulary

EOS, NUM_SCHEMAS, MAX_TOKENS = 2, 200, 500
FORM = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
HELD = [name for name, form in formats.FORMATS.items() if form.writing is not None]
NAMES = ("lookup", "look", 'say "é"')


@dataclass(frozen=True, slots=True)
class Setting:
    """A vocabulary, its markers, and how a model writes calls."""

    vocabulary: Vocabulary
    tokenizer: tokenizers.Tokenizer
    chat_format: ChatFormat


@cache
def setting(name: str, has_tokens: bool) -> Setting:
    tokenizer = tokenizers.Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    if has_tokens:
        tokenizer.add_special_tokens(MARKERS)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    ids = {text: tokenizer.token_to_id(text) for text in MARKERS} if has_tokens else {}
    chat_format = ChatFormat(True, formats.FORMATS[name], token_ids=ids)
    return Setting(read_vocabulary(tokenizer.to_str(), size, [EOS]), tokenizer, chat_format)


def conversation_of(schema: Any, *, is_strict: bool) -> Conversation:
    wrapped = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    closed: dict[str, Any] = wrapped | {"additionalProperties": False}
    if isinstance(schema, dict) and "$defs" in schema:
        closed["$defs"] = schema.pop("$defs")
    tools = tuple(Tool(name, None, closed, is_strict) for name in NAMES)
    return Conversation((Message("user", "Hello"),), tools)


def walk(matcher: Any, begun: list[int], closing: list[int], dice: random.Random) -> list[int]:
    """The tokens of one answer that goes on from `begun`; empty if it does not end."""
    assert matcher.consume_tokens(begun), matcher.get_error()
    token_ids = list(begun)
    while len(token_ids) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")
        choices = [token_id for token_id in closing if allowed[token_id]]
        if not choices or dice.random() < 0.4:
            choices = np.flatnonzero(allowed).tolist()
        ends = allowed[EOS] and dice.random() < 0.3
        token_id = EOS if ends else dice.choice(choices)
        if token_id == EOS:
            return token_ids
        token_ids.append(token_id)
        assert matcher.consume_token(token_id), matcher.get_error()
    return []


def parse(chat_format: ChatFormat, chat: Conversation, pieces: list[str]) -> Reply:
    reader = chat_format.reader(chat, "", None)
    assert reader is not None
    parts = [part for piece in pieces for part in reader.push(piece, is_last=False)]
    return reply_of([*parts, *reader.push("", is_last=True)])


def cut(text: str, dice: random.Random) -> list[str]:
    """The text in random pieces."""
    places = sorted(dice.randrange(len(text) + 1) for _ in range(9))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("has_form", [False, True], ids=["strict", "form"])
@pytest.mark.parametrize("name", HELD)
def test_a_call_that_is_begun_is_valid_and_an_answer_is_calls_or_the_form(
    name: str, has_form: bool, has_tokens: bool
) -> None:
    if name == "llama3_json" and has_form and not has_tokens:
        pytest.skip("refused: a brace begins a call and a form alike")
    where, dice = setting(name, has_tokens), random.Random(f"{name} {has_form} {has_tokens}")
    writing = formats.FORMATS[name].writing
    assert writing is not None
    encode = where.tokenizer.encode
    closing = [EOS, *(where.tokenizer.token_to_id(char) for char in '"}],0123456789')]
    openings = [writing.opening] + ([] if has_form else [f"Let me see. {writing.opening}"])
    num_ended = num_calls = 0
    kinds = {"calls": 0, "form": 0}
    for seed in range(len(name) % 3, NUM_SCHEMAS, 3):  # each format takes its share
        chat = conversation_of(make_schema(seed), is_strict=not has_form)
        asked = JsonSchema("response_format", FORM | {"additionalProperties": False})
        structure = where.chat_format.structure(chat, asked if has_form else None)
        assert structure is not None
        begin = dice.choice(openings)
        if writing.begins_bare and (not has_tokens or dice.random() < 0.5) and not has_form:
            begin = dice.choice(["", '{"'])
        if has_form and dice.random() < 0.3:
            begin = '{"'
        matcher = new_matcher(where.vocabulary, structure.to_grammar())
        begun = encode(begin, add_special_tokens=False).ids
        token_ids = walk(matcher, begun, closing, dice)
        if not token_ids:
            continue
        num_ended += 1
        text = where.tokenizer.decode(token_ids, skip_special_tokens=False)
        whole = parse(where.chat_format, chat, [text])
        pieces = parse(where.chat_format, chat, cut(text, dice))
        assert [(c.name, c.arguments) for c in pieces.tool_calls] == [
            (c.name, c.arguments) for c in whole.tool_calls
        ]
        assert pieces.content == whole.content
        schemas = {tool.name: tool.parameters for tool in chat.tools}
        for call in whole.tool_calls:
            num_calls += 1
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        may_be_none = not begin or (has_form and begin == '{"')
        assert whole.tool_calls or may_be_none, text
        if has_form:
            assert bool(whole.tool_calls) != bool(whole.content), text
            kinds["calls" if whole.tool_calls else "form"] += 1
            if whole.content:
                jsonschema.validate(json.loads(whole.content), FORM)
    assert num_ended > NUM_SCHEMAS // 6 and num_calls > NUM_SCHEMAS // 20
    assert not has_form or all(kinds.values()), kinds


@pytest.mark.parametrize("name", HELD)
def test_text_without_a_call_stays_free(name: str) -> None:
    for has_tokens in (True, False):
        where = setting(name, has_tokens)
        structure = where.chat_format.structure(conversation_of(True, is_strict=True), None)
        assert structure is not None
        for text in ("", "Plain text.\n\nWith <b>tags</b>, é 日本語 and [1, {2}].", "<tool", "a {"):
            matcher = new_matcher(where.vocabulary, structure.to_grammar())
            assert matcher.consume_tokens(where.tokenizer.encode(text).ids)
            assert matcher.is_accepting(), text
