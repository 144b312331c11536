"""Log probabilities of sampled tokens, as columns from worker to gateway.

N of a message's tokens have them, each with the K likeliest tokens. Requests are not known here: a
request for fewer than K uses the first of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wire.columns import INT32, BadColumn, pack, unpack

FLOAT32 = np.dtype("<f4")
Element = TypeVar("Element", bound=np.generic)


class Packed(Protocol):
    """The message with the columns."""

    rows: bytes
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Columns of log probabilities; rows are in ascending order."""

    rows: NDArray[np.integer]  # [N], positions among a message's tokens
    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.integer]  # [N]
    top_token_ids: NDArray[np.integer]  # [N, K]
    top_logprobs: NDArray[np.float32]  # [N, K]

    def __len__(self) -> int:
        return len(self.rows)

    def pack(self) -> dict[str, bytes]:
        """The fields of the message."""
        return {
            "rows": pack(self.rows),
            "logprobs": self.logprobs.astype(FLOAT32).tobytes(),
            "ranks": pack(self.ranks),
            "top_token_ids": pack(self.top_token_ids),
            "top_logprobs": self.top_logprobs.astype(FLOAT32).tobytes(),
        }

    @classmethod
    def unpack(cls, message: Packed, num_tokens: int) -> "LogprobColumns | None":
        """The columns of a message with num_tokens tokens; None if absent. Raises BadColumn."""
        rows = unpack(message.rows, name="logprobs.rows")
        if not len(rows):
            return None
        if rows[0] < 0 or rows[-1] >= num_tokens or (np.diff(rows) <= 0).any():
            raise BadColumn(f"logprobs.rows: not ascending positions among {num_tokens} tokens")
        top_token_ids = unpack(message.top_token_ids, name="logprobs.top_token_ids")
        top_logprobs = _floats(message.top_logprobs, "logprobs.top_logprobs")
        columns = cls(
            rows,
            _floats(message.logprobs, "logprobs.logprobs"),
            unpack(message.ranks, INT32, name="logprobs.ranks"),
            _by_row(top_token_ids, len(rows), "logprobs.top_token_ids"),
            _by_row(top_logprobs, len(rows), "logprobs.top_logprobs"),
        )
        if not len(columns.logprobs) == len(columns.ranks) == len(rows):
            raise BadColumn(f"logprobs: not {len(rows)} logprobs and ranks")
        if columns.top_token_ids.shape != columns.top_logprobs.shape:
            raise BadColumn("logprobs: top_token_ids and top_logprobs differ in length")
        return columns

    def select(self, positions: NDArray[np.integer]) -> "LogprobColumns | None":
        """The columns of the tokens at these positions, renumbered in order; None if empty."""
        at = np.full(max(int(positions.max(initial=0)), int(self.rows[-1])) + 1, len(self))
        at[self.rows] = np.arange(len(self))
        found = at[positions]
        rows = np.flatnonzero(found < len(self))
        if not len(rows):
            return None
        found = found[rows]
        return LogprobColumns(
            rows,
            self.logprobs[found],
            self.ranks[found],
            self.top_token_ids[found],
            self.top_logprobs[found],
        )


def join(parts: Iterable[tuple[int, LogprobColumns | None]]) -> LogprobColumns | None:
    """Concatenates the columns of several messages, each given with its number of tokens."""
    start, moved = 0, []
    for num_tokens, part in parts:
        if part is not None:
            moved.append((part.rows + start, part))
        start += num_tokens
    if not moved:
        return None
    width = max(part.top_token_ids.shape[1] for _, part in moved)
    return LogprobColumns(
        np.concatenate([rows for rows, _ in moved]),
        np.concatenate([part.logprobs for _, part in moved]),
        np.concatenate([part.ranks for _, part in moved]),
        np.concatenate([_widened(part.top_token_ids, width) for _, part in moved]),
        np.concatenate([_widened(part.top_logprobs, width) for _, part in moved]),
    )


def _widened(column: NDArray[Element], width: int) -> NDArray[Element]:
    """Pads [N, K] with zeros to [N, width]; no request of these rows uses the padding."""
    return np.pad(column, ((0, 0), (0, width - column.shape[1])))


def _by_row(column: NDArray[Element], num_rows: int, name: str) -> NDArray[Element]:
    if len(column) % num_rows:
        raise BadColumn(f"{name}: {len(column)} elements for {num_rows} rows")
    return column.reshape(num_rows, -1)


def _floats(column: bytes, name: str) -> NDArray[np.float32]:
    if len(column) % FLOAT32.itemsize:
        raise BadColumn(f"{name}: {len(column)} bytes are not a multiple of {FLOAT32.itemsize}")
    return np.frombuffer(column, dtype=FLOAT32)
