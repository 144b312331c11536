"""The model's own sampling defaults reach requests that leave the fields out, and no others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from default_model import folder as default_model
from gateway.request.sampling_defaults import (
    NO_DEFAULTS,
    BadGenerationConfig,
    SamplingDefaults,
    read_defaults,
)
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import types_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETION: {"prompt": "Hello"},
    RESPONSE: {"input": "Hello"},
}
# As Qwen3's file, and two more keys.
CONFIG = {
    "do_sample": True,
    "eos_token_id": [1, 2],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "transformers_version": "4.51.0",
}
DEFAULTS = {name: CONFIG[name] for name in ("temperature", "top_p", "top_k", "min_p")}
DEFAULTS |= {"repetition_penalty": 1.1}


def write(folder: Path, config: object) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "generation_config.json").write_text(text)
    return folder


def sent(running: Any) -> dict[str, Any]:
    """The sampling parameters that the scheduler was sent last, the default names alone."""
    sampling = running.scheduler.submits[-1].sampling
    names = (*DEFAULTS, "max_tokens")
    return {name: getattr(sampling, name) for name in names if sampling.HasField(name)}


@pytest.fixture
def start_with(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    async def start_one(config: object = CONFIG) -> Any:
        return await start(generation_config=str(write(tmp_path, config)))

    return start_one


async def test_every_api_fills_in_what_a_request_leaves_out(start_with: Any) -> None:
    running = await start_with()
    for route, body in BODIES.items():
        await post(running, route, body | {"temperature": None})
        assert sent(running).items() >= DEFAULTS.items(), route
    stub = InferenceServiceStub(running.channel)
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello")))
    assert sent(running) == DEFAULTS
    turns = [pb.ChatMessage(role="user", content="Hello")]
    async for _ in stub.ChatStream(pb.ChatStreamRequest(messages=turns)):
        pass
    assert sent(running) == DEFAULTS


async def test_what_a_request_says_wins_even_if_it_means_off(start_with: Any) -> None:
    running = await start_with()
    off = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    await post(running, CHAT, BODIES[CHAT] | off)
    assert sent(running) == off
    sampling = types_pb2.SamplingParams(temperature=0, top_p=1)
    options = pb.GenerationOptions(sampling=sampling)
    stub = InferenceServiceStub(running.channel)
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    assert sent(running) == DEFAULTS | {"temperature": 0, "top_p": 1}


async def test_the_most_new_tokens_are_a_default_and_no_cap(start_with: Any) -> None:
    running = await start_with({"max_new_tokens": 7})
    for body, most in (
        ({}, 7),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 9}, 9),
        ({"min_tokens": 8}, 8),
    ):
        await post(running, CHAT, BODIES[CHAT] | body)
        assert sent(running) == {"max_tokens": most}
    await post(running, COMPLETION, BODIES[COMPLETION])
    assert sent(running) == {"max_tokens": 16}  # OpenAI's own default


async def test_several_outputs_are_equal_where_the_model_has_no_temperature(
    start_with: Any,
) -> None:
    running = await start_with({"temperature": 0.0})
    answer = await post(running, CHAT, BODIES[CHAT] | {"n": 2})
    assert len(answer["choices"]) == 2


async def test_the_defaults_are_told(start_with: Any) -> None:
    running = await start_with()
    (model,) = (await running.http.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == DEFAULTS
    answer = await InferenceServiceStub(running.channel).ListModels(pb.ListModelsRequest())
    told = {field.name: value for field, value in answer.sampling_defaults.ListFields()}
    assert told == DEFAULTS
    response = await post(running, RESPONSE, BODIES[RESPONSE] | {"top_p": 0.5})
    assert (response["temperature"], response["top_p"]) == (0.6, 0.5)


async def test_a_model_without_defaults_leaves_them_to_the_scheduler(start: Any) -> None:
    running = await start()
    await post(running, CHAT, BODIES[CHAT])
    assert sent(running) == {}
    (model,) = (await running.http.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == {}


async def test_whose_defaults_are_read_is_chosen(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, {"temperature": 0.5, "top_k": None})
    write(other, {"top_k": 3})
    assert read_defaults(model) == SamplingDefaults(temperature=0.5)
    assert read_defaults(model, "none") == NO_DEFAULTS
    assert read_defaults(model, str(other)) == SamplingDefaults(top_k=3)
    with pytest.raises(BadGenerationConfig, match=r"--generation-config: there is no /nowhere/"):
        read_defaults(model, "/nowhere")
    assert read_defaults(tmp_path) == NO_DEFAULTS


async def test_the_embedded_model_has_none() -> None:
    assert read_defaults(default_model.ensure()) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"temperature": "hot"}, "temperature is 'hot', not a number"),
        ({"top_k": 2.5}, "top_k is 2.5, not a number"),
        ({"top_p": True}, "top_p is True, not a number"),
        ({"temperature": 2.5}, r"temperature: 2.5 is outside \[0, 2\]; --generation-config none"),
        ({"max_new_tokens": 0}, "max_tokens: 0 is outside"),
    ],
)
async def test_a_config_that_cannot_be_used_is_refused_by_its_key(
    config: object, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(BadGenerationConfig, match=rf"generation_config.json:? {problem}"):
        read_defaults(write(tmp_path, config))
