"""Changes of prefix caches: the step at which they are told, and those of a long life."""

import random

import numpy as np

from scheduler_svc.core import Request, SchedulerConfig
from scheduler_svc.core.kv.cache_changes import BlockRemoved, BlockStored, Cleared
from tests.scheduler_svc.core.simulation import Simulation

CONFIG = SchedulerConfig(
    num_blocks=40,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=40,
)


def request(
    handle: int, prompt: list[int], max_tokens: int = 2, salt: str = "", adapter_id: str = ""
) -> Request:
    token_ids = np.array(prompt, dtype=np.int32)
    return Request(
        f"r{handle}", token_ids, handle=handle, max_tokens=max_tokens, cache_salt=salt,
        adapter_id=adapter_id, ignore_eos=True,
    )  # fmt: skip


class Unread(Simulation):
    """Changes are taken by the test."""

    def check(self, may_forget: bool = False) -> None:
        """Nothing: a test of many requests is no test of each call."""


def test_a_block_is_told_when_the_step_that_fills_it_is_answered() -> None:
    simulation = Unread(CONFIG)
    scheduler = simulation.scheduler
    simulation.add(request(0, list(range(13)), max_tokens=6, salt="red", adapter_id="fr"))
    simulation.schedule()
    simulation.schedule()
    assert scheduler.internal_state.pool.num_cached == 3, "found here as soon as it is planned"
    assert scheduler.take_cache_changes() == []
    simulation.update()
    first, second, third = scheduler.take_cache_changes()
    assert (
        isinstance(first, BlockStored)
        and isinstance(second, BlockStored)
        and isinstance(third, BlockStored)
    )
    assert (first.parent, second.parent) == (None, first.block_hash), "not the root of the salt"
    assert (first.keys, second.keys) == (("red",), ())
    assert third.token_ids.tolist() == [8, 9, 10, 11]
    while not (told := scheduler.take_cache_changes()):  # until the fourth has its last token
        simulation.schedule()
        simulation.update()
    assert [one.adapter_id for one in (third, *told) if isinstance(one, BlockStored)] == ["fr"] * 2
    assert scheduler.view.num_tokens(scheduler.find("r0")) >= 16  # type: ignore[arg-type]


def test_a_lost_worker_and_a_reset_clear_all_at_once() -> None:
    simulation = Unread(CONFIG)
    scheduler = simulation.scheduler
    simulation.add(request(0, list(range(13))))
    simulation.schedule()
    scheduler.worker_lost()
    assert scheduler.take_cache_changes() == [Cleared()], "no answer comes for what was planned"
    scheduler.worker_back()
    simulation.results.clear()
    simulation.worker = simulation._fresh_worker()
    simulation.drain(depth=0)
    assert any(isinstance(change, BlockStored) for change in scheduler.take_cache_changes())
    scheduler.reset_prefix_cache()
    assert scheduler.take_cache_changes() == [Cleared()]


def test_the_same_content_in_two_blocks_is_told_once_and_removed_with_the_last() -> None:
    simulation = Unread(CONFIG)
    scheduler = simulation.scheduler
    for handle in range(2):  # both computed at once: the second finds nothing
        simulation.add(request(handle, list(range(9))))
    simulation.drain(depth=0)
    pool = scheduler.internal_state.pool
    stored = [c for c in scheduler.take_cache_changes() if isinstance(c, BlockStored)]
    assert len(stored) == 2
    assert len(pool.cache) >= 2
    for block_id in list(pool.free_queue()):
        pool.cache.evict(block_id)
    removed = [c.block_hash for c in scheduler.take_cache_changes() if isinstance(c, BlockRemoved)]
    assert sorted(removed) == sorted(one.block_hash for one in stored)


def test_ten_thousand_requests_and_three_lost_workers_rebuild_the_same_set() -> None:
    rng, simulation = random.Random(7), Unread(CONFIG)
    reader, scheduler = simulation.reader, simulation.scheduler
    for number in range(10_000):
        prompt = [(place * 7 + rng.randrange(3)) % 40 for place in range(rng.randrange(1, 24))]
        prompt[: rng.randrange(24)] = list(range(len(prompt)))[: rng.randrange(24)]
        simulation.add(request(number, prompt[:30] or [1], 1 + number % 3, rng.choice(["", "red"])))
        if number % 4 == 3:
            simulation.drain(depth=1)
        if number in (2_000, 5_000, 9_000):
            simulation.schedule()
            simulation.lose_worker(rng.randrange(30, 40))
        if number % 100 == 0:
            reader.check(scheduler)
    simulation.drain(depth=1)
    reader.check(scheduler)
    assert scheduler.internal_state.changes is not None
    assert not scheduler.internal_state.changes._waiting, "all steps are answered"
    assert len(reader.known[0]) > 20
    assert scheduler.view.num_evictions > 1_000
