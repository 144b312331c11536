"""Exceptions planted at work on one request: it ends with INTERNAL, the others as if alone.

The tokens of the fake worker follow from seed and position, so an undisturbed run is known.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc import convert
from scheduler_svc.clients.registry import Clients
from scheduler_svc.core import invariants
from scheduler_svc.core.kv.slots import SlotTable
from scheduler_svc.core.queue.waiting import WaitingQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import apply_tokens, prompt_outputs
from scheduler_svc.core.step.planner import Planner
from scheduler_svc.core.step.reuse import Reuse
from scheduler_svc.core.step.state import SchedulerState
from simulator.workers.fake_worker import FakeModel, FakeWorker
from tests.scheduler_svc.conftest import Cluster, cluster
from tests.scheduler_svc.test_shell import expected, generate
from wire.columns import unpack

MODEL = FakeModel(max_model_len=128, num_blocks=200, block_size=4)
NUM_OTHERS, NUM_TOKENS, SECRET = 6, 24, 31_337
Plant = Callable[[pytest.MonkeyPatch], None]


def _request(name: str, seed: int, **more: Any) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=name, prompt_token_ids=[SECRET, *range(1, 9)], sampling=sampling, **more
    )


def _fail_for(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_victim: Callable[..., bool]
) -> None:
    """Raises inside a function of the core, after half of its work, for the victim alone."""
    before = getattr(owner, name)

    def failing(*arguments: Any, **named: Any) -> Any:
        answer = before(*arguments, **named)
        if is_victim(*arguments):
            raise OverflowError(f"token {SECRET} is out of bounds")
        return answer

    monkeypatch.setattr(owner, name, failing)


def _is_victim(sequence: Any) -> bool:
    return bool(sequence.request.request_id == "victim")


def _when_looked_up(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, Reuse, "find", lambda self, sequence, admitted: _is_victim(sequence))


def _when_it_enters(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, SlotTable, "enter", lambda self, sequence, *rest: _is_victim(sequence))


def _when_it_is_admitted(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, SchedulerState, "enter", lambda self, sequence, *rest: _is_victim(sequence))


def _when_it_is_queued(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, WaitingQueue, "append", lambda self, sequence: _is_victim(sequence))


def _when_it_is_sent(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, convert, "_to_new_sequence", lambda new: new.request.request_id == "victim")


def _when_it_ends(patch: pytest.MonkeyPatch) -> None:
    _fail_for(patch, Scheduler, "_end", lambda self, sequence: _is_victim(sequence))


PLANTS = [
    _when_looked_up,
    _when_it_enters,
    _when_it_is_admitted,
    _when_it_is_queued,
    _when_it_is_sent,
    _when_it_ends,
]


async def _run(made: Cluster) -> tuple[list[list[int]], grpc.aio.AioRpcError | None]:
    """The tokens of the others, and the end of the victim, which comes while they run."""
    others = [
        asyncio.create_task(generate(made.scheduler, _request(f"r{i}", seed=i)))
        for i in range(NUM_OTHERS)
    ]
    await made.until(lambda: made.core.num_output_tokens > NUM_OTHERS)
    victim = None
    try:
        await generate(made.scheduler, _request("victim", seed=99))
    except grpc.aio.AioRpcError as error:
        victim = error
    return [(await other)[0] for other in others], victim


@pytest.mark.parametrize("plant", PLANTS)
async def test_an_exception_ends_its_own_request_alone(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch)
    with caplog.at_level(logging.INFO):
        async with cluster(MODEL, max_num_seqs=8) as made:
            tokens, victim = await _run(made)
            invariants.check_invariants(made.core)
            again, _ = await generate(made.scheduler, _request("later", seed=5))
            assert not list(made.core.live())
    assert tokens == [expected(i, 9, NUM_TOKENS) for i in range(NUM_OTHERS)]
    assert again == expected(5, 9, NUM_TOKENS)
    assert victim is not None and victim.code() is grpc.StatusCode.INTERNAL
    assert "OverflowError at" in (victim.details() or "")
    assert "OverflowError at" in caplog.text
    assert str(SECRET) not in caplog.text + (victim.details() or ""), "a prompt's token is told"


def _once(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, *, after: bool) -> None:
    """Raises at the given call of a function that no single request is to blame for."""
    before, calls = getattr(owner, name), iter(range(10**9))

    def failing(*arguments: Any, **named: Any) -> Any:
        is_due = next(calls) == number
        if is_due and not after:
            raise ValueError("planted")
        answer = before(*arguments, **named)
        if is_due:
            raise ValueError("planted")
        return answer

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Planner, "_draft_running"),
        (Planner, "_commit"),
        (apply_tokens.TokenUpdates, "take"),
        (prompt_outputs, "plan_range"),
        (SchedulerState, "acknowledge"),
        (Scheduler, "schedule"),
        (Scheduler, "expire"),
    ],
)
async def test_an_exception_without_a_culprit_loses_no_token(
    owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(MODEL, max_num_seqs=8, lookahead=2) as made:
        _once(monkeypatch, owner, name, number=12, after=after)
        requests = [_request(f"r{i}", seed=i) for i in range(NUM_OTHERS)]
        answers = await asyncio.gather(*(generate(made.scheduler, r) for r in requests))
        invariants.check_invariants(made.core)
    assert [tokens for tokens, _ in answers] == [
        expected(i, 9, NUM_TOKENS) for i in range(NUM_OTHERS)
    ]


async def test_who_missed_tokens_ends_and_nobody_goes_on_with_a_hole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(MODEL, max_num_seqs=8) as made:
        _once(monkeypatch, Clients, "_tell_tokens", number=20, after=False)
        requests = [_request(f"r{i}", seed=i) for i in range(NUM_OTHERS)]
        ends = await asyncio.gather(
            *(generate(made.scheduler, r) for r in requests), return_exceptions=True
        )
        again, _ = await generate(made.scheduler, _request("later", seed=5))
    for i, end in enumerate(ends):
        if isinstance(end, BaseException):
            assert isinstance(end, grpc.aio.AioRpcError)
            assert end.code() is grpc.StatusCode.INTERNAL
        else:
            assert end[0] == expected(i, 9, NUM_TOKENS)
    assert any(isinstance(end, BaseException) for end in ends)
    assert again == expected(5, 9, NUM_TOKENS)


async def test_a_core_that_does_not_hold_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(core: Scheduler) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("scheduler_svc.containment.check_invariants", broken)
    _when_it_enters(monkeypatch)
    with pytest.raises(AssertionError, match="the engine failed"):
        async with cluster(MODEL) as made:
            asking = asyncio.create_task(
                generate(made.scheduler, _request("victim", seed=99))
            )  # it has no answer: the process would be gone
            await made.until(made.running.done)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def test_exceptions_that_go_on_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="the engine failed"):
        async with cluster(MODEL) as made:
            for _ in range(3):
                _once(monkeypatch, Planner, "_draft_running", number=0, after=False)
            asking = asyncio.create_task(generate(made.scheduler, _request("r", seed=1)))
            await made.until(made.running.done)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def test_a_row_that_fails_the_workers_steps_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker cannot say which row it was: the suspects compute alone until one fails again."""
    answer, failed_with, slots = FakeWorker._answer, list[int](), dict[int, str]()

    async def failing(self: FakeWorker, step: Any) -> Any:
        slots.update({new.slot: new.request_id for new in step.new_sequences})
        rows = [slots[slot] for slot in unpack(step.slots).tolist()]
        enters = any(new.request_id == "victim" for new in step.new_sequences)
        if "victim" in rows and (failed_with or not enters):  # first at its second step
            self.last_step_id = step.step_id
            failed_with.append(len(rows))
            return worker_pb2.ModelRunnerOutput(step_id=step.step_id, error="planted")
        return await answer(self, step)

    monkeypatch.setattr(FakeWorker, "_answer", failing)
    async with cluster(MODEL, max_num_seqs=8, max_grant=0, lookahead=0) as made:
        tokens, victim = await _run(made)
    assert tokens == [expected(i, 9, NUM_TOKENS) for i in range(NUM_OTHERS)]
    assert victim is not None and victim.code() is grpc.StatusCode.ABORTED
    assert len(failed_with) == 2 and failed_with[1] == 1, "the second time it was alone"
