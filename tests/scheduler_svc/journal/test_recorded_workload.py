"""A recording as a workload: the requests of a scheduler, submitted to a virtual one."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.journal.options import RecordOptions
from simulator import simulate
from simulator.capacity.recorded import read_recorded
from simulator.capacity.step_times import fit
from simulator.workers.fake_worker import FakeModel

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
BASE_S = 0.01


async def ask(stub: Any, number: int) -> None:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=[*range(1, 20), 20 + number],
        sampling=types_pb2.SamplingParams(max_tokens=5 + number, seed=number, ignore_eos=True),
        tenant="ab"[number % 2],
    )
    async for _ in stub.Generate(request):
        pass


@pytest.fixture
async def recorded(make_cluster: MakeCluster, tmp_path: Path) -> Path:
    """Ten requests at once, four of which can run, with steps of ten milliseconds."""
    folder = tmp_path / "records"
    options = RecordOptions(folder, max_mib=8, keeps_prompts=False)
    async with make_cluster(
        FakeModel(num_blocks=99, block_size=4, max_model_len=64),
        StepTime(base_s=BASE_S),
        record=options,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as cluster:
        await asyncio.gather(*(ask(cluster.scheduler, number) for number in range(10)))
    return folder


async def test_a_recording_tells_who_came_and_how_long_steps_took(recorded: Path) -> None:
    workload = read_recorded(recorded)
    told = [(a.prompt_tokens, a.output_tokens, a.tenant) for a in workload.arrivals]
    assert sorted(told, key=lambda each: each[1]) == [(20, 5 + n, "ab"[n % 2]) for n in range(10)]
    assert workload.arrivals[0].arrival_s == 0.0 and workload.config.num_blocks == 99
    assert median(step.duration_s for step in workload.steps) > 0.9 * BASE_S
    longest_s = max(step.duration_s for step in workload.steps)
    assert 0.5 * BASE_S < fit(workload.steps).of(4, 80) <= 1.5 * longest_s


async def test_it_can_be_asked_what_if(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits_s = []
    for slots in ("4", "10"):
        options = ["--recording", str(recorded), "--max-num-seqs", slots, "--json"]
        assert simulate.main(options) == 0
        summary = json.loads(capsys.readouterr().out)["summary"]
        assert summary["num_completed"] == 10
        assert summary["cached_share"] > 0, "prompts with equal beginnings stay so"
        waits_s.append(summary["ttft"]["p99_s"])
    assert waits_s[1] < waits_s[0] / 2, "with room for all, none waits for the end of another"


def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--recording", str(tmp_path)], ["--recording", "x", "--rate", "5"]):
        with pytest.raises(SystemExit):
            simulate.main(options)
        assert "recording" in capsys.readouterr().err
