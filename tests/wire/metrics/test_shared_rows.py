"""Rows of several processes: sums that never fall, gauges of the living alone."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.pace import patience
from wire.metrics.book import Book
from wire.metrics.declared import counter, gauge
from wire.metrics.shared_rows import (
    ROW_CELLS,
    SharedMetricRows,
    is_alive,
    make_shared_rows,
)

BOOK = Book((counter("x_total", "X."), gauge("x_running", "Running.")))
COUNT, RUNNING = BOOK.at("x_total"), BOOK.at("x_running")


@pytest.fixture
def fd() -> Iterator[int]:
    made = make_shared_rows(3)
    yield made
    os.close(made)


def test_each_process_reads_the_sum_of_all(fd: int) -> None:
    first, second = SharedMetricRows(BOOK, fd, 0), SharedMetricRows(BOOK, fd, 1)
    first.own[COUNT] += 2
    second.own[COUNT] += 5
    second.own[RUNNING] = 4
    assert first.totals() == second.totals() == [7, 4]


def test_the_successor_of_a_dead_process_goes_on_counting(fd: int) -> None:
    SharedMetricRows(BOOK, fd, 0).own[COUNT] += 2
    SharedMetricRows(BOOK, fd, 0).own[RUNNING] = 9
    successor = SharedMetricRows(BOOK, fd, 0)
    assert successor.totals() == [2, 0], "what it ran has ended with it"
    successor.own[COUNT] += 1
    assert successor.totals() == [3, 0]


def test_a_killed_processs_counts_stay_and_its_gauges_go(fd: int) -> None:
    script = (
        "import os, signal\n"
        "from tests.wire.metrics.test_shared_rows import *\n"
        f"own = SharedMetricRows(BOOK, {fd}, 1).own\n"
        "own[COUNT], own[RUNNING] = 40, 6\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], pass_fds=(fd,), timeout=patience(60), check=False
    )
    assert done.returncode == -9
    rows = SharedMetricRows(BOOK, fd, 0)
    rows.own[COUNT], rows.own[RUNNING] = 2, 1
    assert rows.totals() == [42, 1]
    assert rows.processes() == {0: os.getpid()}


def test_a_row_of_another_layout_is_not_counted_and_is_begun_anew(fd: int) -> None:
    other = Book((counter("y_total", "Y."), counter("x_total", "X."), gauge("x_running", "R.")))
    SharedMetricRows(other, fd, 1).own[0] = 100
    ours = SharedMetricRows(BOOK, fd, 0)
    ours.own[COUNT] += 1
    assert ours.totals() == [1, 0]
    assert SharedMetricRows(BOOK, fd, 1).totals() == [1, 0]


def test_a_layout_too_large_for_a_row_is_refused(fd: int) -> None:
    values = tuple(map(str, range(ROW_CELLS)))
    with pytest.raises(ValueError, match=f"do not fit into a row of {ROW_CELLS}"):
        SharedMetricRows(Book((counter("x_total", "X.", "v", values),)), fd, 0)


def test_who_lives() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(patience(30))
    assert is_alive(os.getpid())
    assert not is_alive(ended.pid)
