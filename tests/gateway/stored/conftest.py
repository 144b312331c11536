"""A gateway that stores responses, and the openai package as its client."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest_asyncio


@pytest_asyncio.fixture(loop_scope="module")
async def storing(start: Any) -> Any:
    return await start(store_responses=1)


@pytest_asyncio.fixture(loop_scope="module")
async def client(storing: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{storing.http_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
