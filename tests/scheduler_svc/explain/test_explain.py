"""Explanations of a request's time: the parts add up, and agree with the client's measurement."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.history import recent
from scheduler_svc.explain.explain import explain, find_life
from scheduler_svc.explain.trace import Trace
from simulator.workers.fake_worker import FakeModel
from tests.pace import patience
from tests.scheduler_svc.journal.recorded import Run

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
TOLERANCE_S = patience(0.1)  # for the wire and a busy machine


async def timed(stub: Any, request_id: str, max_tokens: int, seed: int = 1) -> float:
    """Runs a request; returns the seconds until its end."""
    began_s = time.monotonic()
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=request_id,
        prompt_token_ids=range(1, 10),
        sampling=types_pb2.SamplingParams(max_tokens=max_tokens, seed=seed),
    )
    async for _ in stub.Generate(request):
        pass
    return time.monotonic() - began_s


def check_sums(answer: debug_pb2.ExplainResponse) -> None:
    spent = answer.time_spent
    parts = [getattr(spent, field.name) for field in spent.DESCRIPTOR.fields]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(answer.wall_s, abs=1e-6)
    waited = sum(wait.seconds for wait in answer.waits)
    waiting_s = spent.queue_s + spent.grammar_s + spent.preempted_s
    assert waited == pytest.approx(waiting_s, abs=1e-5)


async def test_the_parts_add_up_to_the_wall_time_that_the_client_saw(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.005), max_num_seqs=1) as cluster:
        first = asyncio.create_task(timed(cluster.scheduler, "first", 80))
        await cluster.until(lambda: cluster.engine.groups[0].core.num_running == 1)
        second_s = await timed(cluster.scheduler, "second", 20)
        answers = {}
        for name in ("first", "second"):
            request = debug_pb2.ExplainRequest(request_id=name)
            answers[name] = await cluster.debug.Explain(request)
        first_s = await first
    for name, wall_s in (("first", first_s), ("second", second_s)):
        check_sums(answers[name])
        assert answers[name].wall_s == pytest.approx(wall_s, abs=TOLERANCE_S)
        assert answers[name].state == "length"
    second = answers["second"]
    assert second.waits[0].reason == "for one of the 1 slots (max_num_seqs)"
    # 80 steps of the other are waited for, then 20 of its own made: none is shorter than 5 ms.
    assert second.time_spent.queue_s > 0.3 and second.time_spent.decode_s > 0.05
    assert (second.num_prompt_tokens, second.num_output_tokens) == (9, 20)
    assert answers["first"].time_spent.decode_s > 0.35


async def test_a_lack_of_blocks_and_a_lost_worker_are_told(make_cluster: MakeCluster) -> None:
    model = FakeModel(num_blocks=9, block_size=4, max_model_len=32)
    async with make_cluster(model, StepTime(base_s=0.003), max_num_seqs=4) as cluster:
        asking = [
            asyncio.create_task(timed(cluster.scheduler, f"r{i}", 20, seed=i)) for i in range(4)
        ]
        await cluster.until(lambda: cluster.engine.groups[0].core.num_output_tokens > 12)
        cluster.worker.fail_steps = 1
        walls_s = await asyncio.gather(*asking)
        answers = [
            await cluster.debug.Explain(debug_pb2.ExplainRequest(request_id=f"r{i}"))
            for i in range(4)
        ]
    for answer, wall_s in zip(answers, walls_s, strict=True):
        check_sums(answer)
        assert answer.wall_s == pytest.approx(wall_s, abs=TOLERANCE_S)
        assert answer.time_spent.worker_away_s > 0
    assert max(answer.num_preemptions for answer in answers) > 0
    assert any(w.reason == "for KV blocks" for answer in answers for w in answer.waits)


async def test_an_unknown_id_is_not_found_and_a_live_one_is(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.005)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.debug.Explain(debug_pb2.ExplainRequest(request_id="missing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        asking = asyncio.create_task(timed(cluster.scheduler, "live", 4000))
        await cluster.until(lambda: cluster.engine.groups[0].core.num_output_tokens > 3)
        answer = await cluster.debug.Explain(debug_pb2.ExplainRequest(request_id="live"))
        assert answer.state == "running"
        assert answer.num_output_tokens >= 3
        check_sums(answer)
        asking.cancel()


@pytest.mark.parametrize("seed", range(2))
def test_the_parts_add_up_whatever_happened(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path / "r", f"explain/{seed}", is_masked=False)
    run.act(300)
    run.close()
    core, num_ended = run.world.scheduler, 0
    for request in run.world.requests:
        life = find_life(core, request.request_id, core.now_s)
        if life is not None:  # else it migrated to another scheduler
            num_ended += life.state not in ("waiting", "running", "preempted")
            check_sums(explain(life, core.config.max_num_seqs, Trace()))
    assert num_ended > 20


def test_only_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "KEPT_REQUESTS", 5)
    run = Run(tmp_path / "r", "bounded", is_masked=False)
    run.act(300)
    run.close()
    core = run.world.scheduler
    remembered = [r.request_id for r in run.world.requests if core.recent.find(r.request_id)]
    assert len(remembered) == 5 < core.num_finished
