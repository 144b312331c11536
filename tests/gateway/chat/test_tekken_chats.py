"""Chats with a model of Mistral's that has tekken.json: its control tokens, thoughts and calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import types_pb2
from tests import ranked
from tests.gateway.http_calls import post
from wire.grammar import new_matcher, read_vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/chat/completions"
NAMES = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]")
CONTROLS = [
    {"rank": rank, "token_str": name, "is_control": True}
    for rank, name in enumerate((*NAMES, "[/THINK]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"))
]
TEMPLATE = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}{% for message in messages %}{% if message.role == 'user' -%}
[INST]{{ message.content }}[/INST]{% else %}{% for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor -%}
{% endif %}{% endfor %}{# thoughts stand between [THINK] and [/THINK] #}"""
END = 2


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tekken") / "model"
    folder.mkdir()
    file = ranked.tekken(" ?[^\\s]+|\\s+", num_controls=20, special_tokens=CONTROLS)
    file["config"]["version"] = "v13"
    (folder / "tekken.json").write_text(json.dumps(file))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="session")
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    plain = tokenizers.Tokenizer.from_str(tokenizer.definition())
    return lambda text: plain.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def model_info(model_info: types_pb2.ModelInfo) -> types_pb2.ModelInfo:
    model_info.eos_token_ids[:] = [END]
    return model_info


async def test_thoughts_and_calls_come_out_of_control_tokens(
    running: Any, tokenizer: Tokenizer, encode: Any, weather: dict[str, Any]
) -> None:
    arguments = '{"city": "Zwölf 世界"}'
    running.scheduler.output = encode(f"[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{arguments}")
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [weather]}
    (choice,) = (await post(running, ROUTE, body))["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", arguments)
    assert len(call["id"]) == 9
    prompt = running.scheduler.prompt_of(0)
    assert prompt[0] == 1 and prompt.count(1) == 1
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("[INST]Hi[/INST]")
    turns = [*body["messages"], message, {"role": "tool", "tool_call_id": call["id"]}]
    await post(running, ROUTE, body | {"messages": [*turns, *body["messages"]]})
    again = tokenizer.decode(running.scheduler.prompt_of(-1), skip_special_tokens=False)
    assert f"[TOOL_CALLS]get_weather[ARGS]{arguments}" in again


async def test_a_strict_call_is_held_in_the_models_own_tokens(
    running: Any, tokenizer: Tokenizer, encode: Any, weather: dict[str, Any]
) -> None:
    weather["function"]["strict"] = True
    weather["function"]["parameters"]["additionalProperties"] = False
    running.scheduler.output = encode("Hello")
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [weather]}
    await post(running, ROUTE, body)
    grammar = running.scheduler.submits[-1].sampling.grammar
    size = running.scheduler.model.vocab_size
    vocabulary = read_vocabulary(tokenizer.definition(), size, [END])
    for text, is_held in (
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "世界"}', True),
        ('[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "a"}', True),
        ("[TOOL_CALLS]get_weather[ARGS]{}", False),
        ('[TOOL_CALLS]other[ARGS]{"city": "a"}', False),
    ):
        matcher = new_matcher(vocabulary, grammar)
        token_ids = encode(text)
        num_taken = matcher.try_consume_tokens(token_ids)
        assert (num_taken == len(token_ids) and matcher.is_accepting()) == is_held, text
