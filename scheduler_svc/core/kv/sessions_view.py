"""The sessions of a core as they are now, for reading: how long they are, and how they fare."""

import heapq
from dataclasses import dataclass

from scheduler_svc.core.kv.branches import Branch
from scheduler_svc.core.kv.session_pool import SessionPool

RUNS, WAITS, KEPT, PINNED, LET_GO = "runs", "waits", "kept", "kept by hint", "not kept"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session by its blocks; those that it shares with others are not counted."""

    session_id: str  # empty: its client has not told a name
    tenant: str
    state: str
    num_turns: int
    num_cached_tokens: int  # of its context, on the device
    idle_s: float  # since its last turn ended; 0 while one runs
    num_prompt_tokens: int  # of all its turns
    num_found_tokens: int  # of these, tokens that were not computed


class SessionsView:
    """The sessions that the cache knows; none where its policy is not by sessions."""

    def __init__(self, pool: SessionPool | None, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def __len__(self) -> int:
        return 0 if self._pool is None else sum(1 for _ in self._pool.known_sessions())

    def latest(self, most: int) -> list[SessionInfo]:
        """Up to so many sessions, those with the latest turns first."""
        if self._pool is None:
            return []
        known = self._pool.known_sessions()
        newest = heapq.nlargest(most, known, key=lambda each: (each[1].is_running, each[1].left_s))
        return [self._info(name, branch, self._pool.now_s) for name, branch in newest]

    def _info(self, name: str, branch: Branch, now_s: float) -> SessionInfo:
        return SessionInfo(
            session_id=name,
            tenant=branch.told.tenant,
            state=_state_of(branch),
            num_turns=branch.num_turns,
            num_cached_tokens=branch.num_blocks * self._block_size,
            idle_s=0.0 if branch.is_running else max(now_s - branch.left_s, 0.0),
            num_prompt_tokens=branch.num_prompt_tokens,
            num_found_tokens=branch.num_found_tokens,
        )


def _state_of(branch: Branch) -> str:
    if branch.is_running:
        return RUNS
    if branch.num_expecting:
        return WAITS
    if branch.num_pinned:
        return PINNED
    return KEPT if branch.is_kept else LET_GO
