"""A scheduler process's shell, recorded while it serves."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.config import parse
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.journal.options import RecordOptions
from scheduler_svc.journal.recording import Recording
from scheduler_svc.journal.replay import replay
from simulator.workers.fake_worker import FakeModel

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]


async def ask(stub: Any, number: int, max_tokens: int) -> grpc.StatusCode:
    """Runs a request to its end; returns its status."""
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=[*range(1, 20), 20 + number],
        sampling=types_pb2.SamplingParams(max_tokens=max_tokens, seed=number),
        tenant="ab"[number % 2],
    )
    try:
        async for _ in stub.Generate(request, timeout=0.2 if number % 7 == 6 else None):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("keeps_prompts", [False, True], ids=["replaced", "kept"])
async def test_what_a_service_did_replays(
    make_cluster: MakeCluster, tmp_path: Path, keeps_prompts: bool
) -> None:
    """Includes overload with reservations, deadlines, preemptions, a lost worker and an abort."""
    model = FakeModel(num_blocks=24, block_size=4, max_model_len=64)
    options = RecordOptions(tmp_path / "records", max_mib=8, keeps_prompts=keeps_prompts)
    async with make_cluster(
        model, StepTime(base_s=0.002), record=options, max_num_seqs=6, max_waiting_requests=4
    ) as cluster:
        asking = [asyncio.create_task(ask(cluster.scheduler, i, 40)) for i in range(12)]
        await cluster.until(lambda: cluster.engine.groups[0].core.num_output_tokens > 40)
        asking[0].cancel()
        cluster.worker.fail_steps = 1
        ends = await asyncio.gather(*asking, return_exceptions=True)
        core = cluster.engine.groups[0].core
        assert cluster.engine.groups[0].recorder.why_stopped == ""
    assert {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED} <= set(ends)
    report = replay(Recording(tmp_path / "records"))
    assert report.divergence is None, str(report.divergence)
    assert report.num_steps == core.counters.num_steps
    assert report.num_tokens == core.num_output_tokens
    assert report.num_preemptions == core.view.num_preemptions > 0
    assert report.num_workers_lost > 0


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--record-max-mib 64", "--record"),
        ("--record-prompts keep", "--record"),
        ("--record DIR --record-max-mib 7", "--record-max-mib"),
        ("--record DIR --record-prompts some", "--record-prompts"),
    ],
)
def test_an_option_that_says_nothing_is_refused_by_name(
    line: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(line.split())
    assert names in capsys.readouterr().err


def test_prompts_are_replaced_unless_they_are_to_be_kept() -> None:
    assert parse(["--record", "DIR"]).record == RecordOptions(Path("DIR"), 256, False)
    kept = parse(["--record", "DIR", "--record-prompts", "keep", "--record-max-mib", "9"]).record
    assert kept == RecordOptions(Path("DIR"), 9, True)
    assert parse([]).record is None
