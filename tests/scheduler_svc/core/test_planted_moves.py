"""Planted bugs in block copies: the random walks must find each of them."""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.block_table import BlockTable
from scheduler_svc.core.kv.common_hit import GroupHit, common_hit
from scheduler_svc.core.queue.requirement_waits import RequirementWaits
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step import reuse
from scheduler_svc.core.step.growth import Growth
from scheduler_svc.core.step.reuse import Reuse
from scheduler_svc.core.step.start import Start
from scheduler_svc.core.step.state import SchedulerState
from tests.scheduler_svc.core.soak import assert_found

Monkeypatch = pytest.MonkeyPatch


def _change(monkeypatch: Monkeypatch, name: str, change: Callable[[SchedulerState], None]) -> None:
    """Makes a method of SchedulerState run `change` afterwards."""
    original = getattr(SchedulerState, name)

    def changed(self: SchedulerState, *arguments: Any) -> Any:
        answer = original(self, *arguments)
        change(self)
        return answer

    monkeypatch.setattr(SchedulerState, name, changed)


def _copy_nothing(monkeypatch: Monkeypatch) -> None:
    def forget(state: SchedulerState) -> None:
        state._moves.copied_from.clear()
        state._moves.copied_to.clear()

    _change(monkeypatch, "_fill", forget)


def _fork_in_the_step_that_computes(monkeypatch: Monkeypatch) -> None:
    find = Reuse.find
    monkeypatch.setattr(Reuse, "find", lambda self, sequence, entered: find(self, sequence, []))


def _fork_without_holding_what_is_shared(monkeypatch: Monkeypatch) -> None:
    fork = Reuse._fork

    def weak(self: Reuse, sibling: Sequence, slot: int, num_computed: int) -> Start | None:
        start = fork(self, sibling, slot, num_computed)
        if start is not None:
            hold = [b for b in start.shared if self._state.pool.ref_count(b)]
            start.shared.clear()
            start.shared.extend(reversed(hold))
        return start

    monkeypatch.setattr(Reuse, "_fork", weak)


def _swap_out_in_another_order(monkeypatch: Monkeypatch) -> None:
    _change(monkeypatch, "_swap_out", lambda state: state._moves.swapped_out.reverse())


def _forget_to_swap_in(monkeypatch: Monkeypatch) -> None:
    def forget(state: SchedulerState) -> None:
        state._moves.from_host.clear()
        state._moves.swapped_in.clear()

    _change(monkeypatch, "_fill", forget)


def _keep_the_host_over_a_loss(monkeypatch: Monkeypatch) -> None:
    clear = SchedulerState.clear

    def keep(self: SchedulerState, *sizes: int) -> None:
        host = getattr(self, "host", None)
        clear(self, *sizes)
        if host is not None:
            self.host = host

    monkeypatch.setattr(SchedulerState, "clear", keep)


def _slide_too_far(monkeypatch: Monkeypatch) -> None:
    slide = SchedulerState._slide

    def too_far(self: SchedulerState, table: BlockTable, window: int) -> None:
        slide(self, table, window - 2)

    monkeypatch.setattr(SchedulerState, "_slide", too_far)


def _hit_where_the_first_group_hits(monkeypatch: Monkeypatch) -> None:
    def first_alone(groups: Any, caches: Any, sequence: Sequence, most: int) -> Any:
        end, hits = common_hit(groups[:1], caches[:1], sequence, most)
        nothing = (GroupHit(0, []) for _ in groups[1:])
        return end, [*hits, *nothing]

    monkeypatch.setattr(reuse, "common_hit", first_alone)


def _find_a_block_of_another_group(monkeypatch: Monkeypatch) -> None:
    init = BlockPool.__init__

    def one_cache(self: BlockPool, num_blocks: int, *sizes: int) -> None:
        init(self, num_blocks, *sizes)
        if len(set(sizes)) == 1:
            self.caches = (self.cache,) * len(sizes)

    monkeypatch.setattr(BlockPool, "__init__", one_cache)


def _count_the_first_group_alone(monkeypatch: Monkeypatch) -> None:
    lacking = Growth._lacking

    def of_the_first(self: Growth, *arguments: Any) -> Any:
        found = lacking(self, *arguments)
        found[:, 1:] = 0
        return found

    monkeypatch.setattr(Growth, "_lacking", of_the_first)


def _build_on_what_was_to_be_forgotten(monkeypatch: Monkeypatch) -> None:
    def forget(self: SchedulerState) -> int:
        return self.pool.cache.clear()

    monkeypatch.setattr(SchedulerState, "forget_prefixes", forget)


def _enter_with_the_first_of_several(monkeypatch: Monkeypatch) -> None:
    ask_for = RequirementWaits._ask_for

    def ask_and_await_one(self: RequirementWaits, sequence: Sequence) -> Any:
        yield from ask_for(self, sequence)
        self._asked[sequence] = 1

    monkeypatch.setattr(RequirementWaits, "_ask_for", ask_and_await_one)


def _drop_nothing_else_of_what_failed(monkeypatch: Monkeypatch) -> None:
    def discard(self: RequirementWaits, sequence: Sequence) -> None:
        for waiting in (self._not_asked, self._asked, self._queued):
            waiting.pop(sequence, None)  # type: ignore[attr-defined]
        for number in sequence.preparations.values():
            self._unanswered.pop(number, None)
            self._ready.pop(number, None)

    monkeypatch.setattr(RequirementWaits, "discard", discard)


# Each with an episode that finds it.
PLANTED = [
    (_copy_nothing, 4),
    (_fork_in_the_step_that_computes, 6),
    (_fork_without_holding_what_is_shared, 4),
    (_swap_out_in_another_order, 6),
    (_forget_to_swap_in, 0),
    (_keep_the_host_over_a_loss, 6),
    (_slide_too_far, 2),
    (_hit_where_the_first_group_hits, 5),
    (_find_a_block_of_another_group, 7),
    (_count_the_first_group_alone, 2),
    (_build_on_what_was_to_be_forgotten, 1),
    (_enter_with_the_first_of_several, 31),
    (_drop_nothing_else_of_what_failed, 13),
]


@pytest.mark.parametrize(("plant", "first"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
def test_a_planted_bug_is_found(
    plant: Callable[[Monkeypatch], None], first: int, monkeypatch: Monkeypatch
) -> None:
    plant(monkeypatch)
    assert_found(first)
