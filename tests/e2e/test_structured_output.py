"""Random schemas with the default model: streamed, n = 2, the worker killed midway."""

import asyncio
import json
import os
import re
from typing import Any

import jsonschema
import openai
import pytest

import pagewire
from tests.e2e.conftest import Product
from tests.pace import patience
from tests.schemas import Schema, make_schema

# All 200 take many minutes on two cores; PAGEWIRE_ALL_SCHEMAS=1 runs them.
NUM_SCHEMAS = 200 if os.environ.get("PAGEWIRE_ALL_SCHEMAS") else 12
N = 2
MAX_TOKENS = 400
TIMEOUT_S = patience(900)


class Clients:
    """All clients, and their progress."""

    def __init__(self, product: Product) -> None:
        url = f"{product.url}/v1"
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        self.num_chunks = 0

    async def ask(self, seed: int) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of the outputs for one schema, by choice."""
        stream = await self._client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "An example, please."}],
            response_format=self._format(make_schema(seed)),
            temperature=1,
            seed=seed,
            n=N,
            max_tokens=MAX_TOKENS,
            stream=True,
        )
        texts, reasons = ["" for _ in range(N)], [None for _ in range(N)]
        async for chunk in stream:
            self.num_chunks += 1
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        return dict(enumerate(zip(texts, reasons, strict=True)))

    def _format(self, schema: Schema) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}}

    async def aclose(self) -> None:
        await self._client.close()


async def kill_in_the_middle(product: Product, clients: Clients, after: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while clients.num_chunks < after:
            await asyncio.sleep(0.02)
    product.kill_worker()
    product.start_worker()


async def ask_all(product: Product, num_schemas: int) -> list[dict[int, tuple[str, str | None]]]:
    clients = Clients(product)
    killing = kill_in_the_middle(product, clients, after=num_schemas * N * 5)
    answers = await asyncio.gather(killing, *map(clients.ask, range(num_schemas)))
    await clients.aclose()
    return answers[1:]


@pytest.mark.slow
def test_every_output_fits_its_schema_although_the_worker_dies(product: Product) -> None:
    answers = asyncio.run(ask_all(product, NUM_SCHEMAS))
    product.wait_until_ready()
    formats = jsonschema.FormatChecker(["ipv4", "email"])
    seen = set()
    for seed, outputs in enumerate(answers):
        validator = jsonschema.Draft202012Validator(make_schema(seed), format_checker=formats)
        for text, reason in outputs.values():
            assert reason == "stop", (seed, reason, text)
            validator.validate(json.loads(text))
            seen.add(text)
    assert len(seen) > NUM_SCHEMAS // 2  # the outputs differ


def test_the_sdk_constrains_by_schema_choice_and_pattern(product: Product) -> None:
    with product.sdk() as client:
        size = client.chat("Big?", structured_output=pagewire.Choice("very big", "very small"))
        assert size.text in ("very big", "very small")
        year = client.chat("When?", structured_output=pagewire.Regex(r"(19|20)\d\d"))
        assert re.fullmatch(r"(19|20)[0-9]{2}", year.text)
        schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
        flags = client.stream_chat("Which?", structured_output=pagewire.JsonSchema(schema))
        assert [type(flag) for flag in json.loads(flags.completion().text)] == [bool, bool]


def test_a_form_that_other_parameters_make_impossible_ends_with_the_reason(
    product: Product,
) -> None:
    with product.sdk() as client:
        options = {"structured_output": pagewire.Choice("yes"), "min_tokens": 50, "max_tokens": 60}
        with pytest.raises(pagewire.InvalidArgument, match=r"no token is left.*min_tokens"):
            client.chat("Well?", **options)
