"""Random walks of two groups between which sequences move with their KV."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.core import Scheduler, SchedulerConfig, StepPlan, StepResult
from scheduler_svc.core.kv.loans import Leaving, Loans
from scheduler_svc.core.kv.pulls import BlockPull, Pulls
from scheduler_svc.core.step.peer_moves import PeerMoves
from tests.scheduler_svc.core.fake_worker import FakeWorker
from tests.scheduler_svc.core.simulation import Simulation
from tests.scheduler_svc.core.test_transfer_walks import add, tiered_config

ACTIONS = {
    "add": 14,
    "schedule": 45,
    "update": 45,
    "grant": 10,
    "skip": 20,
    "begin": 12,
    "hand_over": 40,
    "take": 45,
    "answer": 45,
    "answer_twice": 2,
    "answer_nothing": 2,
    "abort": 2,
    "expire": 3,
    "lose": 0.4,
    "drain": 0.4,
}
_BEING_WRITTEN = -1


class FreshWorker(FakeWorker):
    """A process that has just started: a reset forgets nothing that was pulled before it."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.reset:
            assert not self.slots
            self.last_step_id = plan.step_id - 1
        return super().execute(replace(plan, reset=False))


class MovingSimulation(Simulation):
    """One group of two; what clients see is common to both."""

    def __init__(
        self, config: SchedulerConfig, name: str, other: "MovingSimulation | None"
    ) -> None:
        self.roots: dict[tuple[str, str], int] = {} if other is None else other.roots
        super().__init__(config)
        self.name, self.other = name, other
        self.pulls: dict[int, BlockPull] = {}  # not answered
        if other is not None:
            other.other = self
            self.requests, self.outputs = other.requests, other.outputs
            self.told, self.ends = other.told, other.ends

    def _fresh_worker(self) -> FakeWorker:
        worker = FreshWorker(self.config.groups, self.config.vocab_size)
        worker.roots = self.roots  # both serve one model
        return worker

    @property
    def peer(self) -> "MovingSimulation":
        """The other group."""
        assert self.other is not None
        return self.other

    def grant(self, num_steps: int) -> None:
        """Plans decode steps in one frame; the worker executes them at once."""
        for plan in self.scheduler.grant(num_steps):
            self.results.append(self.worker.execute(plan))
        self.check()

    def begin(self, request_id: str) -> None:
        self.scheduler.peer_moves.begin_move(request_id)
        self.check()

    def hand_over(self, *, fits: bool = True) -> None:
        """Sequences that have left go to the other group."""
        for moved in self.scheduler.migration.migrate_moved(self.name):
            place = self.peer if fits else self
            place.scheduler.migration.migrate_in(moved.sequence, moved.lent)
        self.give_back()

    def give_back(self) -> None:
        """Ends the loans that either group needs no more."""
        for one in (self, self.peer):
            for lent in one.scheduler.peer_moves.take_ended_loans():
                source = self if lent.source == self.name else self.peer
                source.scheduler.peer_moves.give_back(lent.loan_id)
        self.check()
        self.peer.check()

    def take(self, s_per_block: float = 0.0) -> None:
        orders = self.scheduler.peer_moves.take_pulls(s_per_block)
        if orders is not None:
            assert self.pulls.keys() >= set(orders.cancelled_ids), "cancelled, and never ordered"
            for pull in orders.pulls:
                self.pulls[pull.transfer_id] = pull
                for block_id in pull.block_ids:
                    self._write(block_id, [_BEING_WRITTEN] * self.config.block_size)
        self.check()

    def answer(self, transfer_id: int, most: int = 1_000) -> None:
        """Copies blocks as they are at the source now, and answers."""
        pull, size = self.pulls.pop(transfer_id), self.config.block_size
        source = self if pull.source == self.name else self.peer
        pairs = list(zip(pull.block_ids, pull.source_block_ids, strict=True))[:most]
        for block_id, other in pairs:
            cells = [source.worker.kv.get((other, offset)) for offset in range(size)]
            self._write(block_id, cells)
        self.scheduler.peer_moves.pull_done(transfer_id, len(pairs))
        self.give_back()

    def _write(self, block_id: int, cells: list[int | None]) -> None:
        for offset, content in enumerate(cells):
            if content is None:
                self.worker.kv.pop((block_id, offset), None)
            else:
                self.worker.kv[block_id, offset] = content

    def lose(self) -> None:
        """Loses the worker; answers of its stream, and pulls from it, are void."""
        before, self.pulls = list(self.pulls), {}
        self.lose_worker()
        self.peer.scheduler.peer_moves.source_lost(self.name)
        for transfer_id in before:
            self.scheduler.peer_moves.pull_done(transfer_id, 1_000)
        self.give_back()

    def drain_to_peer(self) -> None:
        """Closes the group for a while; all that waits and runs goes away."""
        self.scheduler.migration.close()
        for sequence in self.scheduler.migration.migrate_waiting():
            self.peer.scheduler.migration.migrate_in(sequence)
        for sequence in self.scheduler.internal_state.running.sequences:
            self.begin(sequence.request.request_id)
        self.hand_over()
        self.scheduler.migration.reopen()


def two_groups(seed: str) -> tuple[MovingSimulation, MovingSimulation]:
    config = replace(tiered_config(seed), num_tier_blocks=0, num_disk_blocks=0)
    first = MovingSimulation(config, "first", None)
    return first, MovingSimulation(config, "second", first)


def settle(both: tuple[MovingSimulation, MovingSimulation], depth: int) -> None:
    """Goes on until every request has ended; then no block and no reference may be left."""
    for _ in range(5_000):
        for one in both:
            one.hand_over()
            one.take()
            for transfer_id in sorted(one.pulls):
                one.answer(transfer_id)
            while one.scheduler.num_in_flight <= depth and one.schedule() is not None:
                one.take()
            if one.scheduler.is_cutting:
                skip(one)
            elif one.results:
                one.update()
        is_busy = any(one.live or one.results or one.pulls for one in both)
        if not is_busy and not any(one.scheduler.peer_moves.num_in_flight for one in both):
            break
    for one in both:
        one.give_back()
        assert not one.live and not one.scheduler.peer_moves.num_lent
        pool = one.scheduler.internal_state.pool
        assert pool.num_free == pool.num_usable, "a block is lost"


def skip(one: MovingSimulation) -> None:
    """The worker has begun every step that was to be cut: it skips none."""
    pending = one.scheduler._grants.pending
    assert pending is not None
    one.scheduler.skip(pending.last_step_id + 1, pending.last_step_id)
    one.check()


def act(one: MovingSimulation, rng: random.Random, depth: int) -> None:
    action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
    scheduler, unanswered = one.scheduler, sorted(one.pulls)
    running = [s.request.request_id for s in scheduler.internal_state.running.sequences]
    match action:
        case "add":
            add(one, rng)
        case "schedule" if scheduler.num_in_flight <= depth:
            one.schedule()
        case "update" if one.results:
            one.update(bad_rows=(0,) if rng.random() < 0.02 else ())
        case "grant" if scheduler.num_in_flight <= depth:
            one.grant(rng.randint(2, 4))
        case "skip":
            if scheduler.is_cutting or scheduler.cut() is not None:
                skip(one)
        case "begin" if running:
            one.begin(rng.choice(running))
        case "hand_over":
            one.hand_over(fits=rng.random() < 0.9)
        case "take":
            one.take(rng.choice([0.0, 0.5]))
        case "answer" if unanswered:
            one.answer(rng.choice(unanswered), rng.choice([1_000, 1_000, 1, 2]))
        case "answer_twice" if unanswered:
            transfer_id = rng.choice(unanswered)
            one.answer(transfer_id)
            scheduler.peer_moves.pull_done(transfer_id, rng.randrange(5))
        case "answer_nothing" if unanswered:
            one.answer(rng.choice(unanswered), 0)
        case "abort" if one.live:
            one.abort(rng.choice(one.live))
        case "expire":
            for each in (one, one.peer):
                each.expire(scheduler.now_s + rng.choice([0.1, 0.6, 3.0]))
        case "lose":
            one.lose()
        case "drain":
            one.drain_to_peer()
    one.check()
    one.peer.check()


def walk(seed: int, num_actions: int = 500) -> tuple[Scheduler, Scheduler]:
    rng = random.Random(f"moves {seed}")
    both = two_groups(f"moves {seed}")
    depth = rng.randrange(3)
    for _ in range(num_actions):
        act(rng.choice(both), rng, depth)
    settle(both, depth)
    first, second = (one.scheduler for one in both)
    return first, second


@pytest.mark.parametrize("seed", range(12))
def test_no_answer_late_partial_double_or_missing_breaks_a_move(seed: int) -> None:
    walk(seed)


def test_the_walks_move_fall_short_and_time_out() -> None:
    """Otherwise they would show nothing."""
    counts = [core.peer_moves.counts for seed in range(12, 18) for core in walk(seed)]
    assert sum(one.num_pulled for one in counts) > 100
    assert sum(one.num_not_pulled for one in counts) > 20


# --- the proof of the proof: planted faults are found --------------------------------------------


def _lend_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may hold another content once it is read."""
    begin, give_back = Loans.begin, Loans.give_back

    def let_go(self: Loans, leaving: Leaving) -> None:
        begin(self, leaving)
        self._pool.release(leaving.block_ids)

    def take_back(self: Loans, loan_id: int) -> None:
        self._pool.share(self._lent.get(loan_id, []))
        give_back(self, loan_id)

    monkeypatch.setattr(Loans, "begin", let_go)
    monkeypatch.setattr(Loans, "give_back", take_back)
    monkeypatch.setattr("tests.scheduler_svc.core.simulation.check_invariants", lambda _: None)


def _believe_that_all_came(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Pulls.done
    monkeypatch.setattr(Pulls, "done", lambda self, number, _: done(self, number, 1_000))


def _trust_a_source_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of another process is taken for the sequence's KV."""
    monkeypatch.setattr(PeerMoves, "source_lost", lambda self, source: None)


@pytest.mark.parametrize(
    ("plant", "first"),  # the seed whose walk found it when it was planted; any finds it sometime
    [
        (_lend_without_a_reference, 0),
        (_believe_that_all_came, 0),
        (_trust_a_source_that_is_gone, 11),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(first, first + 40):
            walk(seed)
