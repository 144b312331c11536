"""Workers whose sequences have states: old and new ones, and those that follow each other."""

from typing import Any

import pytest

from pagewire.v1 import worker_pb2
from scheduler_svc.config import parse
from scheduler_svc.convert import to_step
from scheduler_svc.core import Scheduler, SchedulerConfig
from scheduler_svc.core_config import check_successor, core_config
from scheduler_svc.sampling import Sampling
from scheduler_svc.worker.served import WrongWorker
from simulator.workers.fake_worker import FakeModel, describe
from tests.scheduler_svc.core.builders import answer, make_request, plan_step
from wire.columns import unpack

CONFIG = parse(["--worker", "127.0.0.1:1"])


def worker(**fields: Any) -> worker_pb2.WorkerDescription:
    description = describe(FakeModel(), 1)
    description.MergeFrom(worker_pb2.WorkerDescription(**fields))
    return description


def config_of(**fields: Any) -> SchedulerConfig:
    return core_config(CONFIG, worker(**fields))


def test_a_worker_without_snapshots_has_no_prefix_cache() -> None:
    assert config_of().enable_prefix_caching
    old = config_of(has_states=True)
    assert not old.enable_prefix_caching and not old.num_state_snapshots
    new = config_of(has_states=True, num_state_snapshots=7)
    assert new.enable_prefix_caching and new.num_state_snapshots == 7
    assert not config_of(num_state_snapshots=7).num_state_snapshots, "of no states"


def test_a_worker_may_have_more_or_fewer_snapshots_than_the_one_before_but_not_none() -> None:
    before = config_of(has_states=True, num_state_snapshots=7)
    check_successor(before, worker(has_states=True, num_state_snapshots=3))
    with pytest.raises(WrongWorker, match="makes snapshots of states"):
        check_successor(before, worker(has_states=True))
    with pytest.raises(WrongWorker, match="makes snapshots of states"):
        check_successor(config_of(has_states=True), worker(has_states=True, num_state_snapshots=7))


def test_snapshots_are_named_on_the_wire() -> None:
    core = Scheduler(config_of(has_states=True, num_state_snapshots=7))
    steps = []
    for name in "ab":
        core.add(make_request(name, 200, max_tokens=1, sampling=Sampling(0.0, 1.0, 0, 0.0, 1)))
        steps.append(to_step(plan_step(core)))
        answer(core, 500)
    first, second = steps
    (slot,) = unpack(first.state_save_slots).tolist()
    assert slot == first.new_sequences[0].slot and not first.new_sequences[0].state_snapshot
    assert unpack(first.state_save_positions).tolist() == [192]
    assert [second.new_sequences[0].state_snapshot] == unpack(first.state_save_snapshots).tolist()
    assert second.new_sequences[0].num_computed_tokens == 192 and not second.state_save_slots
