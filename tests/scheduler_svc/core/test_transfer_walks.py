"""Random walks with a tier whose answers are late, partial, double or missing."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import Refused, Scheduler, SchedulerConfig
from scheduler_svc.core.kv.chain import Chain
from scheduler_svc.core.kv.tier import Tier, TierName
from scheduler_svc.core.kv.transfers import KvTransfers, _InFlight
from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.fake_tier import FakeTier
from tests.scheduler_svc.core.fake_worker import FakeWorker
from tests.scheduler_svc.core.simulation import Simulation
from tests.scheduler_svc.core.test_random_walks import random_request
from tests.scheduler_svc.core.world import draw_config

ACTIONS = {
    "add": 14,
    "schedule": 45,
    "update": 45,
    "take": 45,
    "answer": 45,
    "answer_twice": 2,
    "answer_nothing": 2,
    "abort": 2,
    "expire": 3,
    "lose": 0.6,
    "lose_files": 0.5,
    "ask": 0.5,
    "reset": 0.4,
    "migrate": 0.3,
    "set_priority": 0.5,
}


def tiered_config(seed: str) -> SchedulerConfig:
    """Limits that are reached often, with a tier of two to forty blocks."""
    draw = SeededDraw(seed)
    config = replace(draw_config(draw), kv_groups=(), has_states=False, num_state_snapshots=0)
    return replace(
        config,
        block_size=draw.integer(1, 3),
        num_blocks=draw.integer(33, 50),
        max_model_len=32,
        enable_prefix_caching=True,
        num_tier_blocks=draw.pick([0, 3, 30, 100, 200]),
        num_disk_blocks=draw.pick([0, 3, 40, 400]),
        prepared_kinds=(),
        max_waiting_requests=0,
        max_waiting_tokens=0,
        max_waiting_requests_per_tenant=0,
        max_waiting_tokens_per_tenant=0,
    )


class TieredSimulation(Simulation):
    """A simulation whose worker has a tier; transfers are answered when the walk says so."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.tier = FakeTier(self.worker)

    def take(self, s_per_block: float = 0.0) -> None:
        orders = self.scheduler.transfers.take_transfers(s_per_block)
        if orders is not None:
            self.tier.order(orders)
        self.check()

    def answer(self, transfer_id: int, most: int = 1_000) -> None:
        num_blocks = self.tier.answer(transfer_id, most)
        self.scheduler.transfers.transfer_done(transfer_id, num_blocks)
        self.check()

    def _fresh_worker(self) -> FakeWorker:
        """A worker whose tiers hold what the one before it would have written there."""
        fresh = super()._fresh_worker()
        if hasattr(self, "tier"):
            fresh.roots, fresh._num_resets = self.worker.roots, self.worker._num_resets
        return fresh

    def send_worker_away(self, is_death: bool = False, *, keeps_tier: bool = False) -> None:
        before, tier = self.tier.unanswered, self.tier
        super().send_worker_away(is_death, keeps_tier=keeps_tier)
        self.tier = FakeTier(self.worker, tier, is_same=keeps_tier)
        for transfer_id in before:  # answers of a stream that has ended
            self.scheduler.transfers.transfer_done(transfer_id, 1_000)
        self.check()

    def lose_stream(self) -> None:
        """Loses the stream of a worker that lives, and attaches to it again."""
        self.send_worker_away(keeps_tier=True)
        num_blocks = self.scheduler.transfers.num_held_tier_blocks
        self.scheduler.worker_lost(keeps_tier=True)
        self.scheduler.worker_back()
        self.scheduler.transfers.hear_disk(self.tier.disk_keys)
        assert self.scheduler.transfers.num_held_tier_blocks == num_blocks
        self.check()

    def bring_worker_back(self, *room: int | None) -> None:
        """Attaches a worker, which tells what its disk holds."""
        super().bring_worker_back(*room)
        self.scheduler.transfers.hear_disk(self.tier.disk_keys)
        self.check()

    def settle(self, depth: int) -> None:
        for _ in range(5_000):
            self.take()
            for transfer_id in sorted(self.tier.unanswered):
                self.answer(transfer_id)
            while self.scheduler.num_in_flight <= depth and self.schedule() is not None:
                self.take()
            if self.results:
                self.update()
            elif not self.live and not self.scheduler.transfers.num_in_flight:
                break
        assert not self.live and not self.scheduler.transfers.num_in_flight
        pool = self.scheduler.internal_state.pool
        assert pool.num_free == pool.num_usable, "a block is lost"
        transfers = self.scheduler.internal_state.transfers
        if transfers is not None:
            for tier in transfers.tiers:
                assert tier.pool.num_free == tier.num_blocks, "a block of the tier is lost"
            if transfers.disk is not None:
                self.take()
                found, told = transfers.disk, self.tier.disk_keys
                assert len(told) <= found.num_blocks, "more files than there is room for"
                assert found.pool.cache.likely(told[:1, 0].tolist()) or not len(told)


def add(simulation: Simulation, rng: random.Random) -> None:
    """Submits a request of one of a few families, whose prompts are long; it may be refused."""
    request = random_request(rng, simulation.config, len(simulation.requests))
    if rng.random() < 0.7:
        family, length = rng.randrange(5), rng.randint(12, 28)
        prompt = np.arange(family, family + length, dtype=np.int32)
        request = replace(
            request, prompt_token_ids=prompt, prompt_output_begin=0, prompt_output_end=0
        )
    with contextlib.suppress(Refused):
        simulation.add(request)


def walk(seed: int, num_actions: int = 400) -> Scheduler:
    rng = random.Random(f"tier {seed}")
    simulation = TieredSimulation(tiered_config(f"tier {seed}"))
    depth, scheduler = rng.randrange(3), simulation.scheduler
    for _ in range(num_actions):
        action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        unanswered = sorted(simulation.tier.unanswered)
        match action:
            case "add":
                add(simulation, rng)
            case "schedule" if scheduler.num_in_flight <= depth:
                simulation.schedule()
            case "update" if simulation.results:
                simulation.update(bad_rows=(0,) if rng.random() < 0.02 else ())
            case "take":
                simulation.take(rng.choice([0.0, 0.5]))
            case "answer" if unanswered:
                simulation.answer(rng.choice(unanswered), rng.choice([1_000, 1_000, 1, 2]))
            case "answer_twice" if unanswered:
                transfer_id = rng.choice(unanswered)
                simulation.answer(transfer_id)
                scheduler.transfers.transfer_done(transfer_id, rng.randrange(5))
            case "answer_nothing" if unanswered:
                simulation.answer(rng.choice(unanswered), 0)
            case "abort" if simulation.live:
                simulation.abort(rng.choice(simulation.live))
            case "expire":
                simulation.expire(scheduler.now_s + rng.choice([0.1, 0.6, 3.0]))
            case "lose" if len(simulation.requests) % 2:  # no draw, so that walks stay as they are
                simulation.lose_stream()
            case "lose":
                simulation.lose_worker()
            case "lose_files":
                simulation.tier.lose_files(rng.randint(1, 10))
            case "ask":
                scheduler.transfers.ask_disk(rng.random() < 0.7)
            case "reset":
                simulation.reset_prefix_cache()
            case "migrate":
                leaving = scheduler.migration.migrate_waiting()
                for sequence in leaving:
                    scheduler.migration.migrate_in(sequence)
            case "set_priority" if simulation.live:
                simulation.set_priority(rng.choice(simulation.live), rng.randint(-2, 2))
        simulation.check()
    simulation.settle(depth)
    return scheduler


@pytest.mark.parametrize("seed", range(12))
def test_no_answer_late_partial_double_or_missing_breaks_a_rule(seed: int) -> None:
    walk(seed)


def test_the_walks_fetch_store_drop_and_time_out() -> None:
    """Otherwise they would show nothing."""
    totals = [walk(seed).internal_state.transfer_counts for seed in (13, 30, 37, 93, 94, 96)]
    for tier in TierName:
        for name in ("num_fetched", "num_not_fetched", "num_stored", "num_not_stored"):
            assert sum(getattr(one.of[tier], name) for one in totals) > 10, (tier, name)


# --- the proof of the proof: planted faults are found --------------------------------------------


def _free_at_the_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout, blocks that the worker still writes are handed out."""
    cancel = KvTransfers.cancel

    def free(self: KvTransfers, transfer_id: int) -> None:
        cancel(self, transfer_id)
        self.done(transfer_id, 0)

    monkeypatch.setattr(KvTransfers, "cancel", free)


def _store_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may hold another content once it is copied."""
    begin, done = KvTransfers._begin, KvTransfers.done

    def let_go(self: KvTransfers, transfer: _InFlight) -> None:
        begin(self, transfer)
        if not transfer.is_fetch:
            self._pool.release(transfer.held)

    def take_back(self: KvTransfers, transfer_id: int, num_blocks: int) -> None:
        transfer = self._in_flight.get(transfer_id)
        if transfer is not None and not transfer.is_fetch:
            self._pool.share(transfer.held)
        done(self, transfer_id, num_blocks)

    monkeypatch.setattr(KvTransfers, "_begin", let_go)
    monkeypatch.setattr(KvTransfers, "done", take_back)
    monkeypatch.setattr("tests.scheduler_svc.core.simulation.check_invariants", lambda _: None)


def _believe_that_all_came(monkeypatch: pytest.MonkeyPatch) -> None:
    done = KvTransfers.done
    monkeypatch.setattr(KvTransfers, "done", lambda self, number, _: done(self, number, 1_000))


def _find_in_the_tier_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A content is found in the tier before it was copied there."""
    store = KvTransfers.store

    def early(self: KvTransfers, tier: Tier, chain: Chain, block_ids: list[int]) -> None:
        store(self, tier, chain, block_ids)
        for transfer_id in list(self._in_flight)[-1:]:
            if not (one := self._in_flight[transfer_id]).is_fetch:
                one.tier.pool.share(one.order.tier_blocks)
                one.tier.stored(one.order.tier_blocks, one.chain)

    monkeypatch.setattr(KvTransfers, "store", early)


def _keep_what_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvTransfers, "forget_contents", lambda self: None)


@pytest.mark.parametrize(
    ("plant", "first"),  # the seed whose walk found it when it was planted; any finds it sometime
    [
        (_free_at_the_cancel, 9),
        (_store_without_a_reference, 7),
        (_believe_that_all_came, 4),
        (_find_in_the_tier_at_once, 0),
        (_keep_what_was_reset, 0),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(first, first + 40):
            walk(seed)
