"""A call is admitted as a whole: a full queue refuses its first request, the others come back."""

from typing import Any

import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from tests.gateway.http_calls import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


def refuse_once(scheduler: Any, is_refused: Any) -> list[str]:
    """Refuses these requests the first time that they come; returns the ids, as they come."""
    plain, seen = type(scheduler)._answer, list[str]()

    def answer(submit: Any, outbox: Any) -> None:
        seen.append(submit.request_id)
        if seen.count(submit.request_id) == 1 and is_refused(submit.request_id):
            finished = scheduler_pb2.Finished(
                handle=submit.handle,
                reason=types_pb2.FINISH_REASON_ERROR,
                status_code=8,
                message="too much waits",
                retry_after_s=0.01,
            )
            outbox.put_nowait(scheduler_pb2.SessionResponse(finished=[finished]))
            return
        plain(scheduler, submit, outbox)

    scheduler._answer = answer
    return seen


@pytest.mark.parametrize("stream", [False, True])
async def test_the_other_requests_of_a_call_wait_for_a_full_queue(
    stream: bool, running: Any
) -> None:
    seen = refuse_once(running.scheduler, lambda request_id: not request_id.endswith("-0"))
    body = {"prompt": "Hello", "n": 3, "stream": stream}
    response = await running.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert len(seen) == 5 and len(set(seen)) == 3
    assert response.text.count('"finish_reason":"stop"') == 3


async def test_embeddings_wait_too(running: Any) -> None:
    seen = refuse_once(running.scheduler, lambda request_id: not request_id.endswith("-0"))
    response = await running.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert response.status_code == 200
    assert len(seen) == 3


async def test_a_full_queue_refuses_a_call_with_its_first_request(running: Any) -> None:
    refuse_once(running.scheduler, lambda request_id: request_id.endswith("-0"))
    body = {"prompt": "Hello", "n": 3}
    response = await running.http.post("/v1/completions", json=body)
    assert error_of(response, 429)["code"] == "overloaded"
