"""The places of a step's rows in a graph of a fixed size: one buffer of int32 says all of it.

Sequences that decode come first, the longest ahead, then prompts that sample, then the others; the
tokens of all of them back to back. Plain arithmetic: knows neither graphs nor the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.protocol.step import IntColumn
from worker_svc.runner.rows import Rows, runs

# Tokens of the largest graph. A step of more keeps the device busy for longer than it is launched.
MOST_TOKENS = 4096
_ALIGNMENT = 4  # words: columns start at multiples of 16 bytes
# Of sequences that enter in a step, in its buffer; more are written before.
ENTERING_WORDS = 1 << 14
MAX_ENTERING = 64
_FEWEST_PROMPTS = 4  # that may begin a tile of their own in any graph
_TOKENS_OF_A_PROMPT = 16  # in a graph filled with prompts of so many each has its tiles

Column = TypeVar("Column", NDArray[np.int32], Tensor)


def bucket_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture: 16 apart up to 128, then four to each power of two."""
    sizes = {8, *range(16, 129, 16)}
    for power in (128, 256, 512, 1024, 2048):
        sizes |= set(range(power, 2 * power + 1, power // 4))
    most = min(max_step_tokens, MOST_TOKENS)
    return tuple(sorted({size for size in sizes if size < most} | {most}))


def max_tiles(num_tokens: int, tile_tokens: int) -> int:
    """Tiles of queries that a graph of so many tokens has programs for."""
    return num_tokens // tile_tokens + max(_FEWEST_PROMPTS, num_tokens // _TOKENS_OF_A_PROMPT)


def parts_of(lengths: Sequence[int]) -> tuple[int, tuple[slice, ...]]:
    """Words of a buffer for columns of these lengths, and where in it each one lies."""
    ends = [*accumulate(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)]
    starts = zip((0, *ends), lengths, strict=False)
    return ends[-1], tuple(slice(start, start + length) for start, length in starts)


class Columns(NamedTuple, Generic[Column]):
    """The parts of a step's buffer, as views of it."""

    counts: Column  # [2]: tokens and sequences
    num_decodes: Column  # [1]: the leading sequences that compute one token and sample
    num_entering: Column  # [1]: sequences whose words come after the columns
    slots: Column  # [B]
    starts: Column  # [B]
    firsts: Column  # [B + 1]
    samplers: Column  # [B]: the slot that samples the sequence's next token; -1: none
    tile_rows: Column  # [N]
    tile_firsts: Column  # [N]


class Layout:
    """The places of the parts, on the host as on the device."""

    def __init__(self, max_sequences: int, num_tiles: int) -> None:
        self.max_sequences = max_sequences
        most = max_sequences
        self.num_words, self._parts = parts_of(
            (2, 1, 1, most, most, most + 1, most, num_tiles, num_tiles)
        )
        self._empty = np.zeros(self.num_words, dtype=np.int32)
        columns = self.columns(self._empty)
        columns.samplers[:] = columns.tile_rows[:] = -1

    def empty(self) -> NDArray[np.int32]:
        """The buffer of a step without tokens."""
        return self._empty.copy()

    def columns(self, buffer: Column) -> "Columns[Column]":
        """The parts of a buffer [num_words]."""
        return Columns(*[buffer[part] for part in self._parts])


@dataclass(frozen=True, slots=True)
class StepMap:
    """A step in a graph of `size` tokens."""

    size: int
    num_sampled: int  # of the first sequences
    places: IntColumn  # of the rows that sample, in their order: which sequence each one is
    buffer: NDArray[np.int32]
    layout: Layout
    is_decode: bool = False  # one token each, all sampling

    def with_entering(self, words: NDArray[np.int32], number: int) -> "StepMap | None":
        """The step with so many sequences entering by these words; None: they are too many."""
        if number > MAX_ENTERING or len(words) > ENTERING_WORDS:
            return None
        self.layout.columns(self.buffer).num_entering[:] = number
        return replace(self, buffer=np.concatenate((self.buffer, words)))


def spread(rows: Rows) -> Rows:
    """The rows with each that verifies drafts as so many that decode one token and sample.

    A layer writes the keys and values of all tokens before it attends, so each sees the drafts
    before its own. They come in the order of `RowDrafts.verify`.
    """
    if rows.drafts is None:
        return rows
    num_drafted = rows.drafts.num_drafted
    counts = 1 + num_drafted
    each = np.repeat(np.arange(len(counts)), counts)
    return Rows(
        rows.slots[each],
        (rows.num_scheduled - num_drafted)[each],
        runs(rows.num_computed, counts),
        rows.samples[each],
    )


def map_step(
    rows: Rows, sizes: Sequence[int], tile_tokens: Mapping[int, int], layout: Layout
) -> StepMap | None:
    """The rows in the smallest graph that holds them; None: none does."""
    num_tokens, num_rows = int(rows.num_scheduled.sum()), len(rows.slots)
    if num_tokens > sizes[-1] or num_rows > layout.max_sequences:
        return None
    decodes = rows.samples & (rows.num_scheduled == 1)
    num_decodes = int(np.count_nonzero(decodes))
    # By kind, then the longest ahead.
    kind = 2 - rows.samples.astype(np.int64) - decodes
    order = np.argsort((kind << 32) - rows.num_computed, kind="stable")
    starts, lengths = rows.num_computed[order], rows.num_scheduled[order]
    for size in sizes[int(np.searchsorted(sizes, num_tokens)) :]:
        tiles = _tiles(num_decodes, starts, lengths, tile_tokens[size])
        if len(tiles[0]) <= max_tiles(size, tile_tokens[size]):
            break
    else:
        return None
    num_sampled = int(np.count_nonzero(rows.samples))
    buffer = layout.empty()
    columns = layout.columns(buffer)
    columns.counts[:] = num_tokens, num_rows
    columns.num_decodes[:] = num_decodes
    columns.slots[:num_rows] = rows.slots[order]
    columns.starts[:num_rows] = starts
    columns.firsts[1 : num_rows + 1] = np.cumsum(lengths)
    columns.samplers[:num_sampled] = columns.slots[:num_sampled]
    columns.tile_rows[: len(tiles[0])], columns.tile_firsts[: len(tiles[0])] = tiles
    places = np.empty_like(order)
    places[order] = np.arange(num_rows)
    is_decode = num_decodes == num_rows
    return StepMap(size, num_sampled, places[rows.samples], buffer, layout, is_decode)


def _tiles(
    num_decodes: int, starts: IntColumn, lengths: IntColumn, tile_tokens: int
) -> tuple[IntColumn, IntColumn]:
    """(sequence, first query) of each tile of the sequences that do not decode.

    Those that see the most keys come first, so that short ones fill the tail.
    """
    if num_decodes == len(lengths) - 1:  # one prompt arrives
        backwards = np.arange((int(lengths[-1]) - 1) // tile_tokens, -1, -1)
        return np.full_like(backwards, num_decodes), backwards * tile_tokens
    counts = -(-lengths[num_decodes:] // tile_tokens)
    which = np.repeat(np.arange(num_decodes, len(lengths)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = within * tile_tokens
    order = np.argsort(-(starts[which] + firsts), kind="stable")
    return which[order], firsts[order]
