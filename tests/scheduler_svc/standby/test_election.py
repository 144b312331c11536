"""Who is active: one rule over what workers say, whatever happens in which order."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.standby.election import (
    HELD_PERIOD_S,
    LOT_BITS,
    TICK_S,
    Election,
    Sighting,
    next_term,
)

DELAY_S, SILENCE_S = 1.0, 3.0


def election(lot: int = 0) -> Election:
    return Election(DELAY_S, SILENCE_S, lot)


def sighting(
    epoch: int = 0,
    is_attached: bool | None = False,
    unheard_s: float | None = None,
    incarnation: int = 1,
) -> Sighting:
    return Sighting(incarnation, epoch, is_attached, unheard_s)


def seconds_until_taken(
    one: Election, seen: Mapping[str, Sighting | None], most_s: float = 30.0
) -> float | None:
    """Seconds of looking at the same until it takes the workers; None if it never does."""
    for tick in range(round(most_s / TICK_S)):
        anew = {address: worker and replace(worker) for address, worker in seen.items()}
        if one.tick(anew, TICK_S) is not None:
            return tick * TICK_S
    return None


def test_free_workers_are_taken_after_the_delay() -> None:
    assert seconds_until_taken(election(), {"a": sighting()}) == pytest.approx(DELAY_S)


def test_time_without_a_new_look_does_not_count() -> None:
    """A process that gets no answers in time does not know that the worker is still free."""
    one, old = election(), {"a": sighting()}
    assert all(one.tick(old, TICK_S) is None for _ in range(100))
    assert seconds_until_taken(one, {"a": sighting()}) == pytest.approx(DELAY_S - TICK_S)


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"a": None},
        {"a": sighting(3, is_attached=True)},  # of a scheduler that never says that it lives
        {"a": sighting(3, is_attached=True, unheard_s=0.1)},
        {"a": sighting(3, is_attached=False, unheard_s=0.1)},  # it attaches again soon
        {"a": sighting(3, is_attached=True, unheard_s=0.1), "b": sighting(3, unheard_s=60.0)},
        {"a": sighting(3, is_attached=None)},  # it cannot say
    ],
    ids=["none", "away", "attached", "alive", "between", "one-of-two", "earlier-version"],
)
def test_it_stands_by(seen: dict[str, Sighting | None]) -> None:
    one = election()
    assert seconds_until_taken(one, seen) is None
    assert one.why_waits


def test_a_scheduler_that_fell_silent_loses_the_workers() -> None:
    stopped = {"a": sighting(3, is_attached=True, unheard_s=SILENCE_S + 0.1), "b": None}
    assert seconds_until_taken(election(), stopped) == pytest.approx(DELAY_S)


def test_a_new_worker_is_left_to_the_scheduler_that_was_seen_alive() -> None:
    one = election()
    one.tick({"a": sighting(3, is_attached=True, unheard_s=0.1)}, TICK_S)
    waited_s = seconds_until_taken(one, {"a": None, "b": sighting(incarnation=2)})
    assert waited_s == pytest.approx(5 * DELAY_S)


def test_schedulers_that_begin_to_wait_at_once_do_not_end_at_once() -> None:
    waits_s = [
        seconds_until_taken(election(lot), {"a": sighting()}) for lot in (0, 2**LOT_BITS - 1)
    ]
    assert waits_s == [pytest.approx(DELAY_S), pytest.approx(1.6 * DELAY_S)]


def test_an_attachment_between_two_looks_begins_the_wait_anew() -> None:
    one = election()
    for epoch in range(1, 50):  # lost and attached again, again and again
        assert one.tick({"a": sighting(epoch)}, TICK_S) is None


def test_time_in_which_it_stood_still_itself_does_not_count() -> None:
    one = election()
    assert one.tick({"a": sighting()}, TICK_S) is None
    assert one.tick({"a": sighting()}, 3600.0) is None


@pytest.mark.parametrize(("is_attached", "limit_s"), [(True, SILENCE_S), (False, 0.5)])
def test_late_signs_of_life_make_it_patient(is_attached: bool, limit_s: float) -> None:
    """With a worker, and with one that it keeps while it is not attached."""
    one = election()
    for unheard_s in (0.6 * limit_s, 0.1):
        one.tick({"a": sighting(3, is_attached=is_attached, unheard_s=unheard_s)}, TICK_S)
    late = {"a": sighting(3, is_attached=is_attached, unheard_s=1.3 * limit_s)}
    assert seconds_until_taken(one, late, 5.0) is None
    gone = {"a": sighting(3, is_attached=is_attached, unheard_s=5.1 * limit_s)}
    assert seconds_until_taken(one, gone) is not None


@given(
    epochs=st.lists(st.integers(0, 2**52), min_size=1),
    lots=st.tuples(*[st.integers(0, 2**LOT_BITS - 1)] * 2),
)
def test_a_term_is_above_all_that_was_seen_and_lots_order_equals(
    epochs: list[int], lots: tuple[int, int]
) -> None:
    highest = max(epochs)
    mine, theirs = (next_term(highest, lot) for lot in lots)
    assert min(mine, theirs) > highest
    assert (mine < theirs) == (lots[0] < lots[1])
    assert next_term(max(mine, theirs) + 999, 0) > max(mine, theirs)


# --- a world of two schedulers and three workers --------------------------------------------------


@dataclass(slots=True)
class World:
    """Workers and schedulers in ticks of one second's fraction; schedulers obey the rules."""

    workers: list["Worker"] = field(default_factory=lambda: [Worker(i + 1) for i in range(3)])
    schedulers: list["Player"] = field(default_factory=list)

    def tick(self) -> None:
        for worker in self.workers:
            worker.unheard_s = None if worker.unheard_s is None else worker.unheard_s + TICK_S
        for player in self.schedulers:
            if player.is_running:
                player.tick(self)


@dataclass(slots=True)
class Worker:
    incarnation: int
    is_up: bool = True
    epoch: int = 0
    holder: "Player | None" = None
    unheard_s: float | None = None

    def die(self) -> None:
        self.is_up, self.holder = False, None

    def come_back(self) -> None:
        if not self.is_up:
            self.incarnation += 100
            self.is_up, self.epoch, self.unheard_s = True, 0, None


@dataclass(slots=True)
class Player:
    """A scheduler: it stands by, or attaches as `WorkerGroup` does."""

    lot: int
    is_running: bool = True
    term: int = 0
    election: Election = field(default_factory=election)
    epochs: dict[int, int] = field(default_factory=dict)  # by incarnation
    num_turns: int = 0

    def restart(self) -> None:
        self.term, self.election, self.epochs = 0, Election(DELAY_S, SILENCE_S, self.lot), {}
        self.is_running = True

    def tick(self, world: World) -> None:
        if not self.term:
            seen = {
                str(number): Sighting(w.incarnation, w.epoch, w.holder is not None, w.unheard_s)
                if w.is_up
                else None
                for number, w in enumerate(world.workers)
            }
            self.term = self.election.tick(seen, TICK_S) or 0
            self.num_turns += bool(self.term)
            return
        for worker in world.workers:
            if worker.is_up and not self._keep(worker):
                self.die(world)
                self.restart()
                return

    def _keep(self, worker: Worker) -> bool:
        """Attaches or stays attached; False if another scheduler has overtaken this one."""
        ours = self.epochs.get(worker.incarnation, 0)
        if max(ours, self.term) >= worker.epoch:
            worker.unheard_s = 0.0
        if worker.holder is self:
            return True
        if worker.epoch > ours and (ours or worker.epoch >= self.term):
            return False
        worker.epoch = max(worker.epoch + 1, self.term)
        worker.holder, worker.unheard_s = self, None
        self.epochs[worker.incarnation] = worker.epoch
        return True

    def die(self, world: World) -> None:
        self.is_running = False
        for worker in world.workers:
            if worker.holder is self:
                worker.holder = None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "restart", "stop", "continue", "lose", "return"]),
        st.integers(0, 2),
        st.integers(0, 40),  # ticks until the next event
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, lots=st.permutations([1, 2]))
def test_whatever_happens_one_scheduler_has_all_workers_in_the_end(
    events: list[tuple[str, int, int]], lots: list[int]
) -> None:
    world = World()
    world.schedulers = [Player(lot, election=election(lot)) for lot in lots]
    stopped: set[int] = set()
    for what, which, ticks in events:
        player, worker = world.schedulers[which % 2], world.workers[which]
        match what:
            case "kill":
                player.die(world)
                stopped.discard(which % 2)
            case "restart" if not player.is_running and which % 2 not in stopped:
                player.restart()
            case "stop" if player.is_running:
                player.is_running = False
                stopped.add(which % 2)
            case "continue" if which % 2 in stopped:
                stopped.discard(which % 2)
                player.is_running = True
            case "lose":
                worker.die()
            case "return":
                worker.come_back()
        for _ in range(ticks):
            world.tick()
    for number, player in enumerate(world.schedulers):
        if number in stopped:
            player.is_running = True
        elif not player.is_running:
            player.restart()
    for worker in world.workers:
        worker.come_back()
    for _ in range(200):
        world.tick()
    holders = {worker.holder.lot if worker.holder else None for worker in world.workers}
    assert len(holders) == 1 and None not in holders
    assert [bool(player.term) for player in world.schedulers].count(True) == 1
    turns = [player.num_turns for player in world.schedulers]
    for _ in range(200):  # and it stays so
        world.tick()
    assert [player.num_turns for player in world.schedulers] == turns


def test_the_period_of_signs_of_life_is_shorter_than_what_counts_as_silence() -> None:
    assert 2 * HELD_PERIOD_S < SILENCE_S
