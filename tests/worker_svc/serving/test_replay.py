"""Replay of a recording on another worker: equal tokens, or the position of the fault."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu.library import Library
from pagewire.v1 import worker_pb2
from pagewire.v1.journal_pb2 import JournalEvent
from scheduler_svc.convert import to_result, to_step
from scheduler_svc.core import Policy, Request, Scheduler, SchedulerConfig
from scheduler_svc.journal.options import RecordOptions
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.replay import ReplayReport, replay
from scheduler_svc.journal.start import Made, make_core
from scheduler_svc.journal.worker_replay import replay_on
from scheduler_svc.sampling import Sampling
from scheduler_svc.worker.link import WorkerClient, WorkerLink
from tests.worker_svc.conftest import VOCAB_SIZE, WORKER_CONFIG, serving
from wire.columns import unpack
from worker_svc.protocol.step import StepInput
from worker_svc.runner.model_runner import ModelRunner

NUM_STEPS = 500
LOST_AT = 240  # step id


def config_for(worker: worker_pb2.WorkerDescription) -> SchedulerConfig:
    """Few blocks and small steps, so that prompts are chunked and sequences preempted."""
    return SchedulerConfig(
        num_blocks=16,
        block_size=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=24,
        max_model_len=worker.model.max_model_len,
        vocab_size=worker.model.vocab_size,
        eos_token_ids=tuple(worker.model.eos_token_ids),
        policy=Policy.PRIORITY,
    )


class Traffic:
    """Requests in order of arrival, greedy and sampled, many with shared prefixes."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._rng = random.Random(7)
        self._number = 0
        self.num_aborted = 0

    def flow(self, now_s: float) -> None:
        core, rng = self._core, self._rng
        core.expire(now_s)
        if core.num_running + core.num_waiting < 6:
            core.add(self._request(now_s))
        if rng.random() < 0.02:
            victim = rng.choice([s.request.request_id for s in core.live()])
            self.num_aborted += core.abort(victim) is not None

    def _request(self, now_s: float) -> Request:
        rng, self._number = self._rng, self._number + 1
        shared = np.random.default_rng(rng.randrange(3)).integers(3, VOCAB_SIZE, 40)
        own = np.random.default_rng(self._number).integers(3, VOCAB_SIZE, rng.randint(1, 30))
        is_greedy = rng.random() < 0.5
        return Request(
            f"r{self._number}",
            np.concatenate([shared, own]).astype(np.int32),
            max_tokens=rng.randint(10, 60),
            sampling=Sampling(0.0 if is_greedy else 0.9, 0.95, 0, 0.0, seed=self._number),
            arrival_s=now_s,
            priority=rng.randint(0, 2),
        )


async def record(address: str, folder: Path, *, keeps_prompts: bool) -> Made:
    """500 steps on a real worker, planned one ahead, with one loss of the worker."""
    client = WorkerClient(address, 10.0)
    link = await client.attach(1, 1)
    description = link.attached.description
    options = RecordOptions(folder, 64, keeps_prompts)
    made = make_core(config_for(description), description, address, options)
    core, traffic, is_lost = made.core, Traffic(made.core), False
    while core.last_step_id < NUM_STEPS:
        traffic.flow(core.last_step_id / 100)
        await step(core, link)
        if core.last_step_id == LOST_AT and not is_lost:
            is_lost = True
            core.worker_lost()
            await link.close()
            link = await client.attach(2, core.last_step_id + 1)
            core.worker_back()
    assert traffic.num_aborted > 0
    assert made.recorder is not None
    made.recorder.close()
    assert made.recorder.why_stopped == ""
    await link.close()
    await client.close()
    return made


async def step(core: Scheduler, link: WorkerLink) -> None:
    while core.num_in_flight <= 1 and (plan := core.schedule()) is not None:
        await link.send(to_step(plan))
    if core.num_in_flight:
        core.update(to_result(await link.receive()))


async def record_grants(address: str, folder: Path) -> tuple[Made, int]:
    """Decode steps in grants of eight, cut by arrivals; and the number of skipped steps."""
    client = WorkerClient(address, 10.0)
    link = await client.attach(1, 1)
    description = link.attached.description
    options = RecordOptions(folder, 64, keeps_prompts=True)
    limits = replace(config_for(description), num_blocks=40)
    made = make_core(limits, description, address, options)
    core, traffic, num_skipped = made.core, Traffic(made.core), 0
    while core.last_step_id < 150:
        if not core.num_running or (core.num_running < 3 and core.last_step_id % 5 == 0):
            traffic.flow(core.last_step_id / 100)
        if plans := core.grant(8):
            await link.send(to_step(plans[0], len(plans)))
        elif core.num_in_flight <= 1 and (plan := core.schedule()) is not None:
            await link.send(to_step(plan))
        if (cut := core.cut()) is not None:
            await link.cut(cut.first_step_id, cut.last_step_id)
        if core.num_in_flight or core.is_cutting:
            answer = await link.receive()
            if isinstance(answer, worker_pb2.Skipped):
                num_skipped += core.skip(answer.first_step_id, answer.last_step_id)
            else:
                core.update(to_result(answer))
    assert made.recorder is not None
    made.recorder.close()
    await link.close()
    await client.close()
    return made, num_skipped


@pytest.fixture(scope="module")
def recorded(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Made]:
    """A recording with its prompts, and the core it was made of."""
    folder = tmp_path_factory.mktemp("kept")
    with serving(WORKER_CONFIG, llama_folder) as worker:
        return folder, asyncio.run(record(worker.address, folder, keeps_prompts=True))


def replay_there(address: str, folder: Path, to_step: int | None = None) -> ReplayReport:
    return asyncio.run(replay_on(Recording(folder), address, 30.0, to_step))


def test_the_recording_has_everything_that_may_happen(recorded: tuple[Path, Made]) -> None:
    folder, made = recorded
    report, core = replay(Recording(folder)), made.core
    assert report.divergence is None, str(report.divergence)
    assert report.num_steps >= NUM_STEPS
    assert report.num_tokens == core.num_output_tokens > NUM_STEPS
    assert report.num_preemptions == core.view.num_preemptions > 10
    assert report.num_workers_lost == 1
    assert core.counters.prefix_hit_tokens > 100
    assert core.counters.num_prefill_tokens > 24 * 10  # more than one step holds: in chunks


def test_a_fresh_worker_answers_every_step_with_the_same_tokens(
    recorded: tuple[Path, Made], llama_folder: Path
) -> None:
    with serving(WORKER_CONFIG, llama_folder) as worker:
        report = replay_there(worker.address, recorded[0])
    assert report.divergence is None, str(report.divergence)
    assert report.num_steps >= NUM_STEPS
    assert report.num_tokens == recorded[1].core.num_output_tokens


def test_granted_steps_replay_as_grants_without_those_that_were_skipped(
    llama_folder: Path, tmp_path: Path
) -> None:
    with serving(WORKER_CONFIG, llama_folder) as worker:
        made, num_skipped = asyncio.run(record_grants(worker.address, tmp_path))
        assert num_skipped > 0
        assert replay(Recording(tmp_path)).divergence is None
    with serving(WORKER_CONFIG, llama_folder) as worker:
        report = replay_there(worker.address, tmp_path)
    assert report.divergence is None, str(report.divergence)
    # What was granted and not yet beyond recall at the end is planned, and not counted.
    assert report.num_steps >= made.core.counters.num_steps
    assert report.num_tokens == made.core.num_output_tokens > 100


def decode_steps(folder: Path) -> Iterator[JournalEvent]:
    """Decode steps with at least three rows."""
    for stored in Recording(folder).events():
        event = stored.event
        slots = unpack(event.plan.sampled_slots)
        is_decode = not event.step.num_scheduled and not event.step.new_sequences
        if event.HasField("step") and is_decode and len(slots) >= 3:
            yield event


def plant(monkeypatch: pytest.MonkeyPatch, step_id: int, row: int) -> Callable[[], bool]:
    """Corrupts one row in one call of the attention kernel; returns whether it was called."""
    now: list[int] = [0]
    calls: list[int] = []
    run, attend = ModelRunner.launch, Library.attend

    def launch(self: ModelRunner, step: StepInput, *rest: Any, **more: Any) -> Any:
        now[0] = step.step_id
        return run(self, step, *rest, **more)

    def attend_wrongly(self: Library, *inputs: Any) -> None:
        attend(self, *inputs)
        if now[0] == step_id and not calls:
            calls.append(step_id)
            named = signature(attend).bind(self, *inputs)
            named.arguments["out"][row].mul_(-7)

    monkeypatch.setattr(ModelRunner, "launch", launch)
    monkeypatch.setattr(Library, "attend", attend_wrongly)
    return lambda: bool(calls)


@pytest.mark.parametrize("number", [0, 20])
def test_a_fault_in_one_kernel_call_is_located_by_step_and_slot(
    recorded: tuple[Path, Made],
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    event = list(decode_steps(recorded[0]))[number]
    slot = int(unpack(event.plan.sampled_slots)[1])
    was_called = plant(monkeypatch, event.step.step_id, row=1)
    with serving(WORKER_CONFIG, llama_folder) as worker:
        report = replay_there(worker.address, recorded[0], to_step=event.step.step_id)
    assert was_called()
    assert report.divergence is not None
    assert f"step {event.step.step_id}, row 1, slot {slot}, request 'r" in report.divergence.where
    assert report.divergence.recorded != report.divergence.replayed


def test_a_recording_without_its_prompts_is_refused_by_name(
    llama_folder: Path, tmp_path: Path
) -> None:
    with serving(WORKER_CONFIG, llama_folder) as worker:
        asyncio.run(record(worker.address, tmp_path, keeps_prompts=False))
        assert replay(Recording(tmp_path)).divergence is None
        with pytest.raises(NotReplayable, match="prompts of this recording were replaced"):
            replay_there(worker.address, tmp_path)
