"""The wishes of a step's rows in addition to a token: one buffer of int32 says all of it.

Rows are named by their place in the graph of their step. Plain arithmetic: knows neither graphs nor
the device.
"""

from typing import Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.step import IntColumn
from worker_svc.runner.graphs.step_map import Column, parts_of
from worker_svc.sampling.logits_processors import LogitsProcessors, Penalties

# Instead of the line of a grammar's mask.
UNCHANGED = -2  # the row's logits stay as they are
ALL_ALLOWED = -1


class AskedColumns(NamedTuple, Generic[Column]):
    """The parts of the buffer, as views of it."""

    masks: Column  # [B]: the line of masks that a row has, or one of the numbers above
    wanted: Column  # [N]: rows whose log probabilities are asked for
    written: Column  # [N]: where in the flat token rows their tokens will be
    penalized: Column  # [4 N]: as `penalize` takes them; row -1: none
    factors: Column  # [3 N]: bits of float32


class AskedLayout:
    """The places of the parts, on host and device; at most N rows ask for the same thing."""

    def __init__(self, max_sequences: int, most: int) -> None:
        self.most = most
        self.num_words, self._parts = parts_of((max_sequences, most, most, 4 * most, 3 * most))
        self._empty = np.zeros(self.num_words, dtype=np.int32)
        columns = self.columns(self._empty)
        columns.masks[:], columns.penalized[:most] = UNCHANGED, -1

    def columns(self, buffer: Column) -> "AskedColumns[Column]":
        """The parts of a buffer [num_words]."""
        return AskedColumns(*[buffer[part] for part in self._parts])

    def holds(self, processors: LogitsProcessors, num_wanted: int) -> bool:
        """True if so few rows ask."""
        penalties = processors.penalties
        return num_wanted <= self.most and (penalties is None or len(penalties.rows) <= self.most)

    def empty(self) -> NDArray[np.int32]:
        """The buffer of a step in which no row asks."""
        return self._empty.copy()

    def words(
        self, processors: LogitsProcessors, wanted: IntColumn, written: IntColumn
    ) -> NDArray[np.int32]:
        """The buffer; rows are places already."""
        buffer = self.empty()
        columns = self.columns(buffer)
        columns.masks[processors.rows] = ALL_ALLOWED
        if processors.grammars is not None:
            rows = processors.grammars.rows
            columns.masks[rows] = np.arange(len(rows))
        columns.wanted[: len(wanted)], columns.written[: len(written)] = wanted, written
        if processors.penalties is not None:
            self._penalize(columns, processors.penalties)
        return buffer

    def _penalize(self, columns: "AskedColumns[NDArray[np.int32]]", penalties: Penalties) -> None:
        history, count = penalties.history, len(penalties.rows)
        rows = columns.penalized.reshape(4, self.most)
        rows[:, :count] = penalties.rows, history.slots, history.num_prompt, history.num_tokens
        factors = columns.factors.view(np.float32).reshape(3, self.most)
        factors[:, :count] = penalties.presence, penalties.frequency, penalties.repetition
