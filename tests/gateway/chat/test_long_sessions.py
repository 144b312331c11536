"""Sessions of many turns and tools: their bytes are bounded, not their small numbers."""

from typing import Any

import pytest

from pagewire.v1 import types_pb2
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TURNS, NUM_TOOLS = 2000, 300
NAMES = [f"tool_{number}" for number in range(NUM_TOOLS)]
TURNS = [
    {"role": "assistant" if number % 2 else "user", "content": f"turn {number}"}
    for number in range(NUM_TURNS)
] + [{"role": "user", "content": "the last"}]


@pytest.fixture(scope="module")
def model_info(model_info: types_pb2.ModelInfo) -> types_pb2.ModelInfo:
    model_info.max_model_len = 1 << 20
    return model_info


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TURNS,
        "tools": [{"type": "function", "function": {"name": name}} for name in NAMES],
    },
    "/v1/responses": {
        "input": TURNS,
        "tools": [{"type": "function", "name": name} for name in NAMES],
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": TURNS,
        "tools": [{"name": name, "input_schema": {}} for name in NAMES],
    },
}


@pytest.mark.parametrize("route", BODIES)
async def test_hundreds_of_tools_and_thousands_of_turns_reach_the_model(
    route: str, running: Any, tokenizer: Any
) -> None:
    await post(running, route, BODIES[route])
    prompt = tokenizer.decode(running.scheduler.prompt_of(-1), skip_special_tokens=False)
    assert all(f'"name": "{name}"' in prompt for name in NAMES)
    assert all(turn["content"] in prompt for turn in TURNS)
