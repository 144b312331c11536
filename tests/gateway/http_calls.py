"""Calls to a gateway over HTTP, and a scheduler that sends log probabilities."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import numpy as np
import tokenizers
from numpy.typing import NDArray

from pagewire.v1 import scheduler_pb2, types_pb2
from tests.gateway.conftest import FakeScheduler, tell_of_prompt
from tests.pace import patience
from wire import columns
from wire.grammar import new_matcher, read_vocabulary
from wire.logprobs import LogprobColumns


async def post(running: Any, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of a 200."""
    response = await running.http.post(route, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(running: Any, route: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, param and message of an error."""
    response = await running.http.post(route, json=body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@asynccontextmanager
async def connected(running: Any) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """A bare connection to the gateway, for a limited time."""
    host, port = running.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(patience(20)):
            yield reader, writer
    finally:
        writer.close()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response of this status, checked for the fields that clients expect."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    return error


@contextmanager
def telling_logprobs(
    scheduler: FakeScheduler, tell: Callable[[NDArray[np.int32], int], LogprobColumns]
) -> Iterator[FakeScheduler]:
    """Answers requests for log probabilities with `tell(ids, logprobs)` of the output."""
    plain = type(scheduler)._answer

    def answer(submit: Any, outbox: Any) -> None:
        sampling = submit.sampling
        samples_none = sampling.HasField("max_tokens") and not sampling.max_tokens
        if not sampling.HasField("logprobs") or samples_none:
            plain(scheduler, submit, outbox)
            return
        tell_of_prompt(submit, scheduler.model.vocab_size, outbox)
        ids = np.array(scheduler.output, dtype=np.int32)
        handles = columns.pack([submit.handle] * len(ids), columns.UINT32)
        logprobs = types_pb2.LogprobColumns(**tell(ids, sampling.logprobs).pack())
        outbox.put_nowait(
            scheduler_pb2.SessionResponse(
                handles=handles, token_ids=columns.pack(ids), logprobs=logprobs
            )
        )
        scheduler._finish(submit, outbox)

    scheduler._answer = answer  # type: ignore[method-assign]
    try:
        yield scheduler
    finally:
        del scheduler._answer


def accepts(running: Any, tokenizer: Any, text: str) -> bool:
    """True if the last submitted grammar accepts a complete text."""
    definition = tokenizer.definition()
    vocabulary = read_vocabulary(definition, running.scheduler.model.vocab_size, [1])
    matcher = new_matcher(vocabulary, running.scheduler.submits[-1].sampling.grammar)
    ids = tokenizers.Tokenizer.from_str(definition).encode(text).ids
    return bool(
        matcher.validate_tokens(ids) == len(ids)
        and matcher.consume_tokens(ids)
        and matcher.is_accepting()
    )
