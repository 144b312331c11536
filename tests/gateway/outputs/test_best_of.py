"""best_of without beams: the outputs whose tokens are the likeliest on average."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from tests.gateway.http_calls import post, refusal
from wire import columns
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": [3, 4], "n": 2, "best_of": 4, "return_token_ids": True}
# Output and log probability of each token, by the index of the choice: sums of -4, -3, -8, -2.
OUTPUTS = ([5, 5, 5, 5], -1.0), ([6], -3.0), ([7] * 16, -0.5), ([8, 8], -1.0)


@pytest.fixture(autouse=True)
def submits(running: Any) -> Iterator[list[Any]]:
    def answer(submit: Any, outbox: Any) -> None:
        index = int(submit.request_id.rsplit("-", 1)[-1]) if "-" in submit.request_id else 0
        token_ids, logprob = OUTPUTS[index]
        message = scheduler_pb2.SessionResponse(
            handles=columns.pack([submit.handle] * len(token_ids), columns.UINT32),
            token_ids=columns.pack(token_ids),
        )
        if submit.sampling.HasField("logprobs"):
            rows = np.arange(len(token_ids), dtype=np.int32)
            none = np.zeros((len(rows), 0), np.int32)
            each = np.full(len(rows), logprob, np.float32)
            ranks, no_logprobs = np.ones(len(rows), np.int32), none.astype(np.float32)
            table = LogprobColumns(rows, each, ranks, none, no_logprobs)
            message.logprobs.CopyFrom(types_pb2.LogprobColumns(**table.pack()))
        outbox.put_nowait(message)
        usage = types_pb2.Usage(prompt_tokens=2, completion_tokens=len(token_ids))
        end = scheduler_pb2.Finished(
            handle=submit.handle, usage=usage, reason=types_pb2.FINISH_REASON_STOP
        )
        outbox.put_nowait(scheduler_pb2.SessionResponse(finished=[end]))

    running.scheduler._answer = answer
    yield running.scheduler.submits
    del running.scheduler._answer


async def test_the_likeliest_outputs_per_token_are_returned_best_first(
    running: Any, submits: list[Any]
) -> None:
    answer = await post(running, COMPLETION, BODY | {"request_id": "a"})
    choices = answer["choices"]
    # Means of -1, -3, -0.5 and -1; equal ones stay in the order of their choices.
    assert [choice["token_ids"] for choice in choices] == [[7] * 16, [5] * 4]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(choice["logprobs"] is None for choice in choices), "they were not asked for"
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["prompt_tokens"] == 2
    assert [submit.request_id for submit in submits] == [f"a-{index}" for index in range(4)]
    assert {submit.fork_group for submit in submits} == {"a"}


async def test_each_prompt_has_its_own_best(running: Any) -> None:
    body = BODY | {"prompt": [[3, 4], [5, 6]], "n": 1, "request_id": "a"}
    choices = (await post(running, COMPLETION, body))["choices"]
    assert [choice["token_ids"] for choice in choices] == [[7] * 16, [7] * 16]


async def test_log_probabilities_that_were_asked_for_stay(running: Any) -> None:
    body = BODY | {"logprobs": 0, "request_id": "a"}
    choices = (await post(running, COMPLETION, body))["choices"]
    assert choices[0]["logprobs"]["token_logprobs"] == [-0.5] * 16


async def test_chats_have_it_too(running: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "best_of": 4, "request_id": "a"}
    (choice,) = (await post(running, CHAT, body | {"return_token_ids": True}))["choices"]
    assert choice["token_ids"] == [7] * 16
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_as_many_as_n_chooses_nothing(stream: bool, running: Any, submits: list[Any]) -> None:
    body = BODY | {"best_of": 2, "request_id": "a", "stream": stream}
    response = await running.http.post(COMPLETION, json=body)
    assert response.status_code == 200, response.text
    assert len(submits) == 2
    assert not any(submit.sampling.HasField("logprobs") for submit in submits)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("best_of", {"best_of": 1}),  # fewer than n
        ("best_of", {"best_of": 129}),
        ("best_of", {"stream": True}),
        ("n", {"n": -1, "best_of": 2}),
        ("length_penalty", {"length_penalty": 0.5}),
        ("early_stopping", {"early_stopping": True}),
        ("early_stopping", {"early_stopping": "never"}),
        ("early_stopping", {"early_stopping": "sometimes"}),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    field: str, fields: dict[str, Any], running: Any, submits: list[Any]
) -> None:
    status, param, _ = await refusal(running, COMPLETION, BODY | fields)
    assert (status, param) == (400, field)
    assert not submits
