"""Of a large call only so many outputs are with the scheduler at once; the others wait in order."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.scheduler.readiness import MOST_OF_CALL
from pagewire.v1 import types_pb2
from tests.gateway.conftest import FakeScheduler, Running, eventually
from tests.gateway.http_calls import error_of
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_NUM_SEQS = 2
MOST = 2 * MAX_NUM_SEQS  # outputs at once
NUM_PROMPTS = 5 * MOST
PROMPTS = [[number] * (number + 1) for number in range(NUM_PROMPTS)]


@pytest.fixture
def holding(scheduler_server: tuple[FakeScheduler, str]) -> FakeScheduler:
    """A scheduler that ends nothing by itself."""
    scheduler = scheduler_server[0]
    scheduler.max_num_seqs, scheduler.hangs_after = MAX_NUM_SEQS, 0
    return scheduler


def call(running: Running, route: str, **fields: Any) -> "asyncio.Task[Any]":
    headers = fields.pop("headers", {})
    return asyncio.create_task(running.http.post(route, json=fields, headers=headers))


async def end_one_after_the_other(scheduler: FakeScheduler) -> None:
    """Ends the call's outputs; asserts that each that ends has one successor, and no more."""
    for index in range(NUM_PROMPTS):
        num_submitted = min(MOST + index, NUM_PROMPTS)
        await eventually(
            lambda most=num_submitted: len(scheduler.submits) >= most,  # type: ignore[misc]
            f"{num_submitted} are submitted",
        )
        assert len(scheduler.submits) == num_submitted
        scheduler.finish_hanging(index)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_outputs_come_in_order_and_never_more_than_so_many_at_once(
    stream: bool, start: Callable[..., Any], holding: FakeScheduler
) -> None:
    running = await start()
    largest = call(running, "/v1/completions", prompt=PROMPTS, stream=stream)
    await end_one_after_the_other(holding)
    response = await largest
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"stop"') == NUM_PROMPTS
    assert [holding.prompt_of(index) for index in range(NUM_PROMPTS)] == PROMPTS
    if not stream:
        indices = [choice["index"] for choice in response.json()["choices"]]
        assert indices == list(range(NUM_PROMPTS))


async def test_embeddings_take_turns_too(
    start: Callable[..., Any], holding: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    plain = holding._finish

    def held(submit: Any, outbox: Any, num_tokens: int | None = None) -> None:
        if num_tokens is None:  # asked for by this test
            plain(submit, outbox)

    monkeypatch.setattr(holding, "_finish", held)
    largest = call(running, "/v1/embeddings", input=PROMPTS)
    await end_one_after_the_other(holding)
    assert len((await largest).json()["data"]) == NUM_PROMPTS


async def test_another_caller_has_its_turn_after_those_that_are_with_the_scheduler(
    start: Callable[..., Any], holding: FakeScheduler
) -> None:
    running = await start()
    largest = call(running, "/v1/completions", prompt=PROMPTS)
    await eventually(lambda: len(holding.submits) == MOST, "the first are submitted")
    other = call(running, "/v1/completions", prompt="Hello")
    await eventually(lambda: len(holding.submits) == MOST + 1, "the other one is submitted")
    holding.finish_hanging()
    assert (await other).status_code == 200
    assert not largest.done() and len(holding.submits) == MOST + 1
    largest.cancel()
    await eventually(lambda: len(holding.aborted) == MOST, "what was with the scheduler is aborted")
    await asyncio.sleep(0.1)
    assert len(holding.submits) == MOST + 1, "an output of a call that was left began"


async def test_until_a_scheduler_says_how_many_run_the_number_is_a_constant(
    start: Callable[..., Any], holding: FakeScheduler
) -> None:
    holding.max_num_seqs = 0
    running = await start()
    largest = call(running, "/v1/completions", prompt=[[5]] * (MOST_OF_CALL + 3))
    await eventually(lambda: len(holding.submits) == MOST_OF_CALL, "the first are submitted")
    await asyncio.sleep(0.1)
    assert len(holding.submits) == MOST_OF_CALL
    largest.cancel()


async def test_an_output_that_waited_has_only_the_time_that_is_left(
    start: Callable[..., Any], holding: FakeScheduler
) -> None:
    running = await start()
    largest = call(running, "/v1/completions", prompt=PROMPTS, headers={"x-timeout-s": "500"})
    await eventually(lambda: len(holding.submits) == MOST, "the first are submitted")
    await asyncio.sleep(0.3)
    holding.finish_hanging(0)
    await eventually(lambda: len(holding.submits) == MOST + 1, "the next is submitted")
    assert [submit.timeout_s for submit in holding.submits[:MOST]] == [500] * MOST
    assert 500 - patience(10) < holding.submits[MOST].timeout_s <= 500 - 0.3
    largest.cancel()


async def test_a_gateway_that_drains_computes_the_whole_of_a_call_that_it_has_accepted(
    start: Callable[..., Any], holding: FakeScheduler
) -> None:
    running = await start(drain_timeout_s=patience(60))
    largest = call(running, "/v1/completions", prompt=PROMPTS)
    await eventually(lambda: len(holding.submits) == MOST, "the first are submitted")
    ending = asyncio.create_task(running.gateway.stop())
    await eventually(lambda: running.gateway._readiness._is_draining, "it drains")
    assert error_of(await call(running, "/v1/completions", prompt="Hello"), 503)
    await end_one_after_the_other(holding)
    response = await largest
    assert response.status_code == 200 and len(response.json()["choices"]) == NUM_PROMPTS
    await ending


async def test_the_first_failure_ends_the_call_and_no_other_output_begins(
    start: Callable[..., Any], holding: FakeScheduler
) -> None:
    running = await start()
    largest = call(running, "/v1/completions", prompt=PROMPTS)
    await eventually(lambda: len(holding.submits) == MOST, "the first are submitted")
    holding.end = {"reason": types_pb2.FINISH_REASON_ERROR, "status_code": 13}
    holding.finish_hanging(1)
    assert (await largest).status_code == 500
    await asyncio.sleep(0.1)
    assert len(holding.submits) <= MOST + 1 and len(holding.aborted) >= MOST - 1
