"""MetricRows that several processes write, each its own, and each can read: metrics of one service.

The rows are in memory that a supervisor makes and its children inherit. What a child has counted
stays when it dies, and its successor goes on from there: sums never fall, so that a rate over them
is right.
"""

import mmap
import os
import tempfile
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wire.metrics.book import Book, Row

ROW_CELLS = 4096  # per process, whatever its version's layout needs
_SIGNATURE, _PID, _NUM_HEAD_CELLS = 0, 1, 2
_CELL_BYTES = 8


def make_shared_rows(num_rows: int) -> int:
    """Memory for so many rows, all 0; returns its file descriptor, to be inherited."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pagewire-metrics")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_rows * ROW_CELLS * _CELL_BYTES)
    return fd


def is_alive(pid: int) -> bool:
    """True if there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class MetricRows:
    """One process's row, and the sums over all rows of its layout."""

    def __init__(self, book: Book) -> None:
        self.own: Row = book.new_row()

    def totals(self) -> list[float]:
        """The cells, summed over the processes."""
        return [*self.own]

    def processes(self) -> dict[int, int]:
        """Process id by row, of the processes that live; empty where there is only this one."""
        return {}


class SharedMetricRows(MetricRows):
    """MetricRows of several processes. A row of another layout is not counted."""

    def __init__(
        self, book: Book, fd: int, index: int, lives: Callable[[int], bool] = is_alive
    ) -> None:
        if book.num_cells > ROW_CELLS - _NUM_HEAD_CELLS:
            raise ValueError(f"{book.num_cells} cells do not fit into a row of {ROW_CELLS}")
        self._lives = lives
        self._signature = book.signature
        self._num_cells = book.num_cells
        self._gauges = book.gauges
        shared = mmap.mmap(fd, os.fstat(fd).st_size)
        self._cells: NDArray[np.float64] = np.frombuffer(shared).reshape(-1, ROW_CELLS)
        mine = self._cells[index]
        if mine[_SIGNATURE] != self._signature:
            mine[:] = 0.0
        self.own = memoryview(shared).cast("d")[
            index * ROW_CELLS + _NUM_HEAD_CELLS : index * ROW_CELLS
            + _NUM_HEAD_CELLS
            + book.num_cells
        ]
        for at in self._gauges:  # of the process before this one
            self.own[at] = 0.0
        mine[_PID], mine[_SIGNATURE] = os.getpid(), self._signature

    def totals(self) -> list[float]:
        """The cells, summed over the processes: counts of all, gauges of those that live."""
        heads = self._cells[:, :_NUM_HEAD_CELLS].tolist()
        is_ours = np.array([head[_SIGNATURE] == self._signature for head in heads])
        lives = np.array([self._lives(int(head[_PID])) for head in heads])
        cells = self._cells[:, _NUM_HEAD_CELLS : _NUM_HEAD_CELLS + self._num_cells]
        totals = cells[is_ours].sum(axis=0)
        totals[self._gauges] = cells[is_ours & lives][:, self._gauges].sum(axis=0)
        return [float(total) for total in totals]

    def processes(self) -> dict[int, int]:
        """Process id by row, of the processes that live."""
        pids = {row: int(pid) for row, pid in enumerate(self._cells[:, _PID].tolist())}
        return {row: pid for row, pid in pids.items() if pid and self._lives(pid)}
