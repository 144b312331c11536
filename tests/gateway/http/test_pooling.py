"""vLLM's `/pooling` and `/classify`."""

import base64
from typing import Any

import numpy as np
import pytest

from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The capital of France is Paris."
POOLING, CLASSIFY = "/pooling", "/classify"


async def test_a_vector_for_each_prompt_in_both_encodings(running: Any) -> None:
    body = {"model": "tiny", "input": [TEXT, "Hello"]}
    embedded = await post(running, "/v1/embeddings", body)
    answer = await post(running, POOLING, body | {"task": "embed"})
    assert answer["object"] == "list" and answer["id"].startswith("pool-")
    assert answer["usage"] == embedded["usage"] | {"completion_tokens": 0}
    vectors = [entry["embedding"] for entry in embedded["data"]]
    assert answer["data"] == [
        {"index": index, "object": "pooling", "data": vector}
        for index, vector in enumerate(vectors)
    ]
    packed = await post(running, POOLING, body | {"task": "embed", "encoding_format": "base64"})
    for entry, vector in zip(packed["data"], vectors, strict=True):
        assert np.frombuffer(base64.b64decode(entry["data"]), "<f4").tolist() == vector


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({}, "task", "each token"),
        ({"task": "token_embed"}, "task", "token_embed"),
        ({"task": "classify"}, "task", "classify"),
        ({"task": "no such task"}, "task", "one of"),
        ({"task": "embed", "dimensions": 3}, "dimensions", "vectors"),
        ({"task": "embed", "messages": [{"role": "user", "content": "a"}]}, "messages", ""),
        ({"task": "embed", "encoding_format": "bytes"}, "encoding_format", ""),
        ({"task": "embed", "embed_dtype": "float16"}, "embed_dtype", ""),
    ],
)
async def test_what_is_not_pooled_is_refused_by_name(
    fields: dict[str, Any], param: str, word: str, running: Any
) -> None:
    status, name, message = await refusal(running, POOLING, {"input": TEXT} | fields)
    assert (status, name) == (400, param) and word in message


async def test_a_model_that_writes_text_classifies_nothing(running: Any) -> None:
    status, param, message = await refusal(running, CLASSIFY, {"input": TEXT})
    assert (status, param) == (400, "model") and "no classification head" in message
    body = {"input": TEXT, "model": "none of these"}
    assert (await running.http.post(CLASSIFY, json=body)).status_code == 404
