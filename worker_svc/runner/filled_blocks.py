"""Tokens that have keys and values in a cache that is filled only where it is needed."""

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.step import IntColumn, Limits, StepInput


class FilledBlocks:
    """The number of each block's tokens, on device and host, that have their KV there."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._device = np.zeros(limits.num_blocks, dtype=np.int64)
        self._host = np.zeros(limits.num_host_blocks, dtype=np.int64)
        self._device[0] = limits.block_size  # the null block: its KV is never read

    def apply(self, step: StepInput) -> None:
        """Follows a step's changes. If it fails, less is known to be there than is."""
        if step.reset:
            self._device[1:] = self._host[:] = 0
        if (moves := step.moves) is not None:
            self._host[moves.to_host] = self._device[moves.swapped_out]
            self._device[moves.swapped_in] = self._host[moves.from_host]
            self._device[moves.copied_to] = self._device[moves.copied_from]
        self._device[step.appended_block_ids] = 0
        for sequence in step.new_sequences:
            full, rest = divmod(sequence.num_computed_tokens, self._block_size)
            if rest:  # its own block: what it was copied from may have gone on in another way
                last = sequence.block_ids[full]
                self._device[last] = min(self._device[last], rest)
            self._device[sequence.block_ids[full + (rest > 0) :]] = 0
        self._device[0] = self._block_size

    def num_filled(self, tables: NDArray[np.int32]) -> IntColumn:
        """Tokens [B] at the head of each block table [B, W] that have their KV there."""
        filled = self._device[tables]  # [B, W]
        is_full = (filled == self._block_size).cumprod(axis=1)
        num_full = is_full.sum(axis=1)
        after = np.append(filled, np.zeros((len(tables), 1), dtype=np.int64), axis=1)
        first_gap = after[np.arange(len(tables)), num_full]
        return np.asarray(num_full * self._block_size + first_gap, dtype=np.int64)

    def fill(self, tables: NDArray[np.int32], begins: IntColumn, ends: IntColumn) -> None:
        """The tokens from `begins` [B] to `ends` [B] of block tables [B, W] have it now."""
        firsts = np.arange(tables.shape[1]) * self._block_size  # [W]
        counts = np.clip(ends[:, None] - firsts, 0, self._block_size)
        is_new = (counts > 0) & (firsts + self._block_size > begins[:, None])
        self._device[tables[is_new]] = counts[is_new]
        self._device[0] = self._block_size
