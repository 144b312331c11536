"""Reasoning before a structured answer, and a budget of reasoning, over HTTP."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from gateway.tokens.tokenizer import Tokenizer
from tests.gateway.http_calls import post, refusal
from wire.grammar import Matcher, new_matcher, read_vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
JSON = '{"sunny": true}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BUDGET = "thinking_token_budget"
FORCED = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "special"])
def model_folder(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A model whose reasoning ends with a token of its own, which text may leave out."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(model_folder, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken("</think>", special=request.param)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


class Grammar:
    """The grammar of the last request."""

    def __init__(self, running: Any, tokenizer: Tokenizer) -> None:
        definition = tokenizer.definition()
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        vocabulary = read_vocabulary(definition, running.scheduler.model.vocab_size, [1])
        grammar = running.scheduler.submits[-1].sampling.grammar
        self._matcher = new_matcher(vocabulary, grammar)

    def at(self, text: str) -> Matcher | None:
        """The matcher after a text; None if the text breaks the grammar."""
        matcher = self._matcher.deep_copy()
        for token_id in self._tokenizer.encode(text).ids:
            mask = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            if not mask[token_id]:
                return None
            assert matcher.consume_token(token_id), matcher.get_error()
        return matcher

    def accepts(self, text: str) -> bool:
        matcher = self.at(text)
        return matcher is not None and matcher.is_accepting()

    def next_ids(self, text: str) -> list[int]:
        """The tokens that may follow a text."""
        matcher = self.at(text)
        assert matcher is not None, text
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        return ids


async def answer(running: Any, body: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Reasoning, content and calls' arguments, whole and streamed alike."""
    (choice,) = (await post(running, ROUTE, body))["choices"]
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    whole = (message.get("reasoning_content") or "", message["content"] or "", calls)
    reasoning, content, pieces = "", "", dict[int, str]()
    response = await running.http.post(ROUTE, json=body | {"stream": True})
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for one in json.loads(line[6:])["choices"]:
            reasoning += one["delta"].get("reasoning_content") or ""
            content += one["delta"].get("content") or ""
            for call in one["delta"].get("tool_calls") or ():
                text = call["function"].get("arguments") or ""
                pieces[call["index"]] = pieces.get(call["index"], "") + text
    assert (reasoning, content, [*pieces.values()]) == whole
    return whole


async def test_a_form_binds_the_answer_after_the_reasoning(
    running: Any, tokenizer: Tokenizer, encode: Any
) -> None:
    body = {"messages": [USER], "response_format": FORM}
    for begin, reasoning in (("<think>\nHm, {}.\n</think>\n\n", "Hm, {}."), ("", "")):
        running.scheduler.output = encode(begin + JSON)
        assert await answer(running, body) == (reasoning, JSON, [])
        assert Grammar(running, tokenizer).accepts(begin + JSON)
    grammar = Grammar(running, tokenizer)
    for text in ("Hm. " + JSON, "<think>Hm.", "<think>Hm.</think>", "<think>a</think>No."):
        assert not grammar.accepts(text), text
    assert not grammar.accepts(f"<think>{JSON}</think>{JSON}</think>")


async def test_no_reasoning_comes_where_the_prompt_has_ended_it(
    running: Any, tokenizer: Tokenizer, encode: Any
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 5}
    running.scheduler.output = encode(JSON)
    body = {"messages": [USER], "response_format": FORM} | off
    assert await answer(running, body) == ("", JSON, [])
    assert not Grammar(running, tokenizer).accepts("<think>Hm.</think>" + JSON)


async def test_calls_come_after_the_reasoning_forced_or_with_a_form(
    running: Any, tokenizer: Tokenizer, encode: Any, weather: Any
) -> None:
    thought = "<think>Hm.</think>\n"
    forced = {"messages": [USER], "tools": [weather], "tool_choice": "required"}
    running.scheduler.output = encode(thought + FORCED)
    assert await answer(running, forced) == ("Hm.", "", ['{"city": "Paris"}'])
    assert Grammar(running, tokenizer).accepts(thought + FORCED)
    assert not Grammar(running, tokenizer).accepts(thought + JSON)
    both = {"messages": [USER], "tools": [weather], "response_format": FORM}
    for text, content, calls in ((CALL, "", ['{"city": "Paris"}']), (JSON, JSON, [])):
        running.scheduler.output = encode(thought + text)
        assert await answer(running, both) == ("Hm.", content, calls)
        assert Grammar(running, tokenizer).accepts(thought + text)
        assert Grammar(running, tokenizer).accepts(text)
    assert not Grammar(running, tokenizer).accepts(thought + "Sunny.")


@pytest.mark.parametrize("form", [None, FORM], ids=["free", "form"])
async def test_after_a_budget_of_tokens_the_reasoning_has_to_end(
    running: Any, tokenizer: Tokenizer, form: Any
) -> None:
    close = tokenizer.markers()[0]["</think>"]
    for budget in (0, 1, 7):
        body = {"messages": [USER], "thinking_token_budget": budget, "response_format": form}
        await post(running, ROUTE, body)
        grammar = Grammar(running, tokenizer)
        for count in range(budget):
            assert len(grammar.next_ids("<think>" + "z" * count)) > 200
        assert grammar.next_ids("<think>" + "z" * budget) == [close]
        assert grammar.accepts("<think></think>\n" + JSON) and grammar.accepts(JSON)


async def test_under_a_budget_an_answer_without_reasoning_stays_free(
    running: Any, tokenizer: Tokenizer
) -> None:
    await post(running, ROUTE, {"messages": [USER], "thinking_token_budget": 1})
    grammar = Grammar(running, tokenizer)
    for text in ("", "Hello\n{}", f"Let me see. {CALL}", "A <think>b c d e</think> f", " </think>"):
        assert grammar.accepts(text), text
    assert not grammar.accepts("\n<think>a b c d</think>")
    await post(running, ROUTE, {"messages": [USER], "thinking_token_budget": -1})
    assert running.scheduler.submits[-1].sampling.grammar == ""


async def test_the_budget_of_the_messages_api_bounds_the_thoughts(
    running: Any, tokenizer: Tokenizer
) -> None:
    body = {"messages": [USER], "max_tokens": 50}
    for budget, is_held in ((3, True), (50, False)):
        thinking = {"type": "enabled", "budget_tokens": budget}
        await post(running, "/v1/messages", body | {"thinking": thinking})
        assert bool(running.scheduler.submits[-1].sampling.grammar) == is_held
    await post(running, "/v1/messages", body | {"thinking": thinking | {"budget_tokens": 3}})
    close = tokenizer.markers()[0]["</think>"]
    assert Grammar(running, tokenizer).next_ids("<think>zzz") == [close]


async def test_a_budget_that_cannot_be_held_is_refused_by_name(running: Any) -> None:
    for route, body in (
        (ROUTE, {"messages": [USER], "thinking_token_budget": -2}),
        (ROUTE, {"messages": [USER], "thinking_token_budget": 3, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "Hello", "thinking_token_budget": 3}),
    ):
        status, field, _ = await refusal(running, route, body)
        assert (status, field) == (400, "ignore_eos" if "ignore_eos" in body else BUDGET), body
