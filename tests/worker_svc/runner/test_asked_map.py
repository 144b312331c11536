"""The buffer that says what rows ask for: each entry where its row lies."""

import numpy as np
import torch

from tests.worker_svc.runner.interpreted import CPU
from worker_svc.protocol.step import IntColumn
from worker_svc.runner.graphs.asked_map import ALL_ALLOWED, UNCHANGED, AskedLayout
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.logits_processors import History, LogitsProcessors, Penalties

MOST = 4


def column(*values: int) -> IntColumn:
    return np.array(values, dtype=np.int64)


def penalties(rows: IntColumn) -> Penalties:
    numbers = np.arange(len(rows))
    history = History(torch.zeros((9, 9)), rows + 10, numbers + 20, numbers + 30)
    each = np.linspace(-1.0, 1.0, len(rows), dtype=np.float32)
    return Penalties(rows, each, each * 2, each + 3, history)


def test_nobody_asks() -> None:
    layout = AskedLayout(6, MOST)
    buffer = layout.empty()
    assert np.array_equal(buffer, layout.words(LogitsProcessors(), column(), column()))
    columns = layout.columns(buffer)
    assert (columns.masks == UNCHANGED).all() and (columns.penalized[:MOST] == -1).all()


def test_each_request_is_at_the_place_of_its_row() -> None:
    layout = AskedLayout(6, MOST)
    grammars = Grammars(32).fill(column(4, 1), [], column(), lambda: column())
    asked = LogitsProcessors(
        penalties=penalties(column(5, 1, 0)), grammars=grammars, rows=column(0, 1, 4, 5)
    )
    columns = layout.columns(layout.words(asked, column(3, 5), column(70, 80)))
    free = ALL_ALLOWED
    assert columns.masks.tolist() == [free, 1, UNCHANGED, UNCHANGED, 0, free]
    assert columns.wanted.tolist() == [3, 5, 0, 0] and columns.written.tolist() == [70, 80, 0, 0]
    rows = columns.penalized.reshape(4, MOST)
    assert rows[:, :3].tolist() == [[5, 1, 0], [15, 11, 10], [20, 21, 22], [30, 31, 32]]
    assert rows[0, 3] == -1
    factors = columns.factors.view(np.float32).reshape(3, MOST)
    assert factors[:, 0].tolist() == [-1.0, -2.0, 2.0] and factors[:, 2].tolist() == [1, 2, 4]


def test_on_a_device_the_parts_are_the_same() -> None:
    layout = AskedLayout(6, MOST)
    words = layout.words(LogitsProcessors(), column(2), column(1 << 30))
    there = layout.columns(torch.from_numpy(words).to(CPU))
    for here, part in zip(layout.columns(words), there, strict=True):
        assert here.tolist() == part.tolist()


def test_more_rows_than_it_has_room_for_are_not_held() -> None:
    layout = AskedLayout(9, MOST)
    few, many = (LogitsProcessors(penalties=penalties(np.arange(n))) for n in (MOST, MOST + 1))
    assert layout.holds(few, MOST) and layout.holds(LogitsProcessors(), 0)
    assert not layout.holds(many, 0) and not layout.holds(few, MOST + 1)
