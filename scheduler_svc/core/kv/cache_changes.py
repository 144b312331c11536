"""Gains and losses of prefix caches, in order, for those outside who keep an index of them.

A block is findable here as soon as a step that fills it is planned; outside it counts once that
step is answered. So each change waits for the newest step planned when it was made.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A content that a block of a group now has, and none had before."""

    group: int
    block_hash: int
    parent: int | None  # the hash of the block before it; None: it is the first of its chain
    token_ids: NDArray[np.int32]  # [block_size]
    keys: tuple[str, ...] = ()  # what the content depends on besides tokens: salt, pictures
    adapter_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A content that no block of a group has any more."""

    group: int
    block_hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """All contents of all groups are gone."""


Change = BlockStored | BlockRemoved | Cleared


class CacheChanges:
    """The changes that were not taken yet."""

    def __init__(self) -> None:
        self.step_id = 0  # the newest step that is planned, or under construction
        self._waiting: deque[tuple[int, Change]] = deque()

    def add(self, change: Change) -> None:
        """Notes a change."""
        self._waiting.append((self.step_id, change))

    def clear(self) -> None:
        """Forgets what waits: all contents are gone, without any step."""
        self._waiting.clear()
        self._waiting.append((0, Cleared()))

    def take(self, answered_step_id: int) -> list[Change]:
        """Removes and returns the changes that wait for steps up to this one."""
        waiting, taken = self._waiting, list[Change]()
        while waiting and waiting[0][0] <= answered_step_id:
            taken.append(waiting.popleft()[1])
        return taken
