"""The threaded fake worker: a scheduler runs on it, and its steps take the modelled time."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from scheduler_svc.core import Request
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.engine import Engine
from scheduler_svc.sampling import Sampling
from simulator.__main__ import parse
from simulator.workers.fake_worker import FakeModel
from simulator.workers.loopback import DeviceStep, LoopbackWorker, start
from simulator.workers.slots import token_at
from tests.pace import patience
from tests.scheduler_svc.conftest import service_config

pytestmark = pytest.mark.usefixtures("any_step_is_granted")
NUM_TOKENS = 120
STEP_S = 0.002


async def run_requests(port: int, num_requests: int, **options: object) -> list[list[int]]:
    """Runs requests to their end; returns the tokens of each."""
    engine = Engine(service_config(port, **options))
    running = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(patience(20)):
            while not engine.is_ready:
                await asyncio.sleep(0.01)
            client, outbox = engine.open_client()
            for number in range(num_requests):
                sampling = Sampling(temperature=0, top_p=1, top_k=0, min_p=0, seed=number)
                prompt = np.array([1, 2, 3, number], dtype=np.int32)
                engine.submit(
                    Request(
                        f"r{number}", prompt, NUM_TOKENS, sampling=sampling, client=client,
                        handle=number,
                    )
                )  # fmt: skip
            found: list[list[int]] = [[] for _ in range(num_requests)]
            num_ended = 0
            while num_ended < num_requests:
                parcel = await outbox.take()
                num_ended += len(parcel.ended)
                for handle, token in zip(parcel.handles, parcel.token_ids, strict=True):
                    found[handle].append(int(token))
            return found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(("lookahead", "max_grant"), [(1, 0), (1, 8)])
async def test_a_scheduler_runs_on_it_and_every_step_takes_its_time(
    lookahead: int, max_grant: int
) -> None:
    records: list[DeviceStep] = []
    worker = LoopbackWorker(FakeModel(), StepTime(STEP_S, 0, 0), records.append)
    server, port = start(worker, "127.0.0.1:0")
    options = {"lookahead": lookahead, "max_grant": max_grant, "state_check_interval": 9}
    try:
        found = await run_requests(port, 3, **options)
    finally:
        server.stop(None)
    positions = np.arange(4, 4 + NUM_TOKENS)
    for number, token_ids in enumerate(found):
        seeds = np.full(NUM_TOKENS, number, dtype=np.uint64)
        assert token_ids == token_at(seeds, positions, 32000).tolist()
    assert [record.step_id for record in records] == list(range(1, len(records) + 1))
    steps_s = [later.ended_s - before.ended_s for before, later in pairwise(records)]
    assert min(steps_s) >= STEP_S
    assert (sum(record.bytes_in == 0 for record in records) > 20) is (max_grant > 0)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--step-time", "fast"], "--step-time: base_s is 'fast', not a number"),
        (["--step-time=-1,0,0"], "--step-time: base_s is -1, must not be negative"),
        (["--step-time", "1,2"], "--step-time: '1,2' has 2 numbers"),
        (["--block-size", "0"], "--block-size: 0 must be at least 1"),
        (["--unheard-of", "1"], "--unheard-of"),
    ],
)
def test_a_bad_option_is_refused_by_name(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert names in capsys.readouterr().err


def test_a_step_time_is_a_base_or_a_model() -> None:
    assert parse(["--step-time", "0.003"]).step_time == StepTime(0.003, 0, 0)
    assert parse(["--step-time", "0.003,1e-5,1e-8"]).step_time == StepTime(0.003, 1e-5, 1e-8)
