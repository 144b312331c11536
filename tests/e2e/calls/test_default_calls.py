"""Calls of the default model under random schemas: valid, whole and streamed alike.

A few in free text, with a strict tool; PAGEWIRE_ALL_SCHEMAS=1 runs 200, and those with a form, too.
"""

from typing import Any

import pytest

from tests.e2e.calls.random_calls import (
    NUM_ALL,
    RESPONSE_FORMAT,
    RUNS_ALL,
    TIMEOUT_S,
    ask_all,
    asking,
    body_of,
    tools_of,
)
from tests.e2e.conftest import Product

NUM_SCHEMAS = NUM_ALL if RUNS_ALL else 3
MAX_TOKENS = 120
NUM_EARLIER = 3


def earlier_calls() -> list[dict[str, Any]]:
    """Turns after which the model mostly calls, too; their arguments suit no schema."""
    turns = []
    for number in range(900, 900 + NUM_EARLIER):
        function = {"name": "lookup", "arguments": '{"x": null}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        turns += [asking(number), {"role": "assistant", "content": None, "tool_calls": [call]}]
    return turns


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("has_form", [True, False], ids=["form", "strict"])
def test_a_call_that_the_default_model_begins_is_valid(
    has_form: bool, product: Product, capsys: pytest.CaptureFixture[str]
) -> None:
    if not RUNS_ALL and has_form:
        pytest.skip("needs PAGEWIRE_ALL_SCHEMAS=1: some minutes")

    def body(seed: int) -> dict[str, Any]:
        asked = body_of(seed, tools_of(seed)) | {"max_tokens": MAX_TOKENS}
        if not has_form:
            return asked | {"messages": [*earlier_calls(), asking(seed)]}
        return asked | {"response_format": RESPONSE_FORMAT}

    kinds = ask_all(product.url, body, NUM_SCHEMAS)
    with capsys.disabled():
        print(f"\ndefault, {'form' if has_form else 'strict'}: {dict(kinds)}")
    assert kinds["calls"] >= max(1, NUM_SCHEMAS // 6)
    assert not RUNS_ALL or kinds["form" if has_form else "text"]
