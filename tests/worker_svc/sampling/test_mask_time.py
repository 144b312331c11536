"""Masks that take long: most are filled side by side, and a row that takes too much ends."""

import threading
from collections import Counter
from concurrent.futures import Future

import llguidance.numpy
import numpy as np
import pytest

from worker_svc.sampling import mask_filling as module
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.mask_filling import FREE_S, GrammarPlace, MaskFiller

NUM_ROWS = 24
NOTHING = np.zeros(0, dtype=np.int64)


class Clock(threading.local):
    """Seconds of each thread."""

    now_s = 0.0


class Clocked:
    """Matchers whose masks take a given time, by clocks that nothing else moves: one a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs_s: list[float]) -> None:
        self.clock, self.alone, self.together = Clock(), Counter[int](), Counter[int]()
        self.costs_s = costs_s
        monkeypatch.setattr(module.time, "thread_time", lambda: self.clock.now_s)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.clock.now_s)
        monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", self._one)
        monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", self._many)
        monkeypatch.setattr(MaskFiller, "_threads", lambda masks: None)
        self.grammars = Grammars(64)
        self.places = [GrammarPlace(self._built(row), 0) for row in range(len(costs_s))]

    def step(self) -> dict[int, str]:
        """The problems of one more step of all rows."""
        num_unread = np.zeros(len(self.places), dtype=np.int64)
        rows = np.arange(len(self.places))
        return self.grammars.fill(rows, self.places, num_unread, lambda: NOTHING).problems()

    def _one(self, matcher: "Row", masks: object, index: int) -> None:
        assert matcher.index == index
        self.alone[index] += 1
        self.clock.now_s += self.costs_s[index]

    def _many(self, threads: object, rows: list[tuple["Row", int]], masks: object) -> None:
        assert all(matcher.index == index for matcher, index in rows)
        self.together.update(index for _, index in rows)
        self.clock.now_s += max(self.costs_s[index] for _, index in rows)

    @staticmethod
    def _built(row: int) -> "Future[Row]":
        built: Future[Row] = Future()
        built.set_result(Row(row))
        return built


class Row:
    """In place of a matcher."""

    def __init__(self, index: int) -> None:
        self.index = index

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return True


def test_quick_masks_are_filled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Clocked(monkeypatch, [0.001] * NUM_ROWS)
    assert [rows.step() for _ in range(5)] == [{}] * 5
    assert rows.alone.total() == 0
    assert set(rows.together.values()) == {5}


def test_of_many_slow_masks_a_few_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Clocked(monkeypatch, [0.0009] * (NUM_ROWS - 1) + [0.006])
    steps = 2 * NUM_ROWS
    assert [rows.step() for _ in range(steps)] == [{}] * steps
    per_step = rows.alone.total() / (steps - 1)  # nothing was timed in the first
    assert 1 <= per_step <= 3
    assert min(rows.alone.values()) >= 2
    assert max(rows.alone.values()) - min(rows.alone.values()) <= 1
    for row in range(NUM_ROWS):
        assert rows.alone[row] + rows.together[row] == steps


def test_a_row_that_takes_too_long_ends_soon_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [0.0009] * NUM_ROWS
    costs[7] = 2 * FREE_S
    rows = Clocked(monkeypatch, costs)
    found = [rows.step() for _ in range(1 + NUM_ROWS)]
    first = next(index for index, problems in enumerate(found) if problems)
    assert first <= NUM_ROWS // 2  # at least two rows of a step are timed
    assert found[first].keys() == {7}
    assert "takes too long to follow" in found[first][7]


def test_a_new_row_is_timed_before_those_timed_already(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Clocked(monkeypatch, [0.0009] * NUM_ROWS + [0.006])
    for _ in range(NUM_ROWS):
        assert rows.step() == {}
    rows.costs_s[3] = 2 * FREE_S
    rows.places[3] = GrammarPlace(rows._built(3), 0)
    assert rows.step().keys() == {3}
