"""Calls of a tiny model under random schemas: valid, whole and streamed alike.

A few with the tiny model, whose chat template knows no tools. PAGEWIRE_ALL_SCHEMAS=1 runs 200, and
calls in free text too, with a tiny model that has tokens for them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.e2e.calls.random_calls import (
    NUM_ALL,
    RESPONSE_FORMAT,
    RUNS_ALL,
    TIMEOUT_S,
    ask_all,
    body_of,
    tools_of,
)
from tests.e2e.conftest import SMALL, Product
from tests.tiny_model import save_tiny_model

NUM_SCHEMAS = NUM_ALL if RUNS_ALL else 6
MAX_TOKENS = 500
EOS = 2
RENAMED = {"<jupyter_script>": "<tool_call>", "<empty_output>": "</tool_call>"}


@pytest.fixture(scope="module")
def calling(
    tiny_product: Product, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    """A tiny model; for all schemas one with a token that opens a call."""
    if not RUNS_ALL:
        yield tiny_product
        return
    folder = save_tiny_model(tmp_path_factory.mktemp("calling") / "tiny", model)
    text = (folder / "tokenizer.json").read_text()
    for name, new_name in RENAMED.items():
        text = text.replace(json.dumps(name), json.dumps(new_name))
    (folder / "tokenizer.json").write_text(text)
    with Product(folder, tmp_path_factory.mktemp("logs"), SMALL) as product:
        product.start()
        yield product
        product.stop()


def biases(tokenizer: tokenizers.Tokenizer, seed: int, has_form: bool) -> dict[str, float]:
    """Biases under which a model of no language begins calls, and ends them."""
    ids = {text: tokenizer.token_to_id(text) for text in ['"', "}", "]", "<", "<tool_call>"]}
    closing = {str(ids[text]): 12.0 for text in ('"', "}", "]")} | {str(EOS): 90.0}
    if has_form:
        return closing | ({str(ids["<"]): 100.0} if seed % 2 else {})
    begins = 100.0 if seed % 2 else 14.0
    return closing | {str(ids["<tool_call>"]): begins, str(EOS): begins - 10}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("has_form", [True, False], ids=["form", "strict"])
def test_a_call_that_the_tiny_model_begins_is_valid(
    has_form: bool, calling: Product, capsys: pytest.CaptureFixture[str]
) -> None:
    if not RUNS_ALL and not has_form:
        pytest.skip("needs PAGEWIRE_ALL_SCHEMAS=1: a model with a token that opens a call")
    tokenizer = tokenizers.Tokenizer.from_file(str(calling.model / "tokenizer.json"))

    def body(seed: int) -> dict[str, Any]:
        asked = body_of(seed, tools_of(seed)) | {"max_tokens": MAX_TOKENS}
        asked["logit_bias"] = biases(tokenizer, seed, has_form)
        return asked | ({"response_format": RESPONSE_FORMAT} if has_form else {})

    kinds = ask_all(calling.url, body, NUM_SCHEMAS)
    with capsys.disabled():
        print(f"\ntiny, {'form' if has_form else 'strict'}: {dict(kinds)}")
    assert kinds["calls"] >= max(1, NUM_SCHEMAS // 6)
    assert not has_form or kinds["form"]
