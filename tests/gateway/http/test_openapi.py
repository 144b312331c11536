"""docs/openapi.json is the served schema, and matches the models.

After a change of the models, write it anew with PAGEWIRE_WRITE_GOLDEN=1.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.http.schema import ChatCompletionBody

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = Path(__file__).parents[3] / "docs" / "openapi.json"


async def test_the_committed_description_is_the_one_that_is_served(running: Any) -> None:
    served = (await running.http.get("/openapi.json")).json()
    text = json.dumps(served, indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("PAGEWIRE_WRITE_GOLDEN"):
        PATH.write_text(text)
    assert PATH.read_text() == text, "write it anew with PAGEWIRE_WRITE_GOLDEN=1"


async def test_it_describes_the_forms_that_bodies_take() -> None:
    schemas = json.loads(PATH.read_text())["components"]["schemas"]
    chat = schemas["ChatCompletionBody"]
    assert set(chat["properties"]) == set(ChatCompletionBody.model_fields)
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    content = schemas["ChatMessage"]["properties"]["content"]["anyOf"]
    assert {"type": "string"} in content
    assert {"type": "string"} in chat["properties"]["stop"]["anyOf"]
    assert {"type": "string"} in schemas["ResponseBody"]["properties"]["input"]["anyOf"]


async def test_every_route_says_how_it_fails() -> None:
    paths = json.loads(PATH.read_text())["paths"]
    assert "/v1/chat/completions" in paths
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert "default" in operation["responses"], (path, method)
            assert "422" not in operation["responses"], (path, method)
