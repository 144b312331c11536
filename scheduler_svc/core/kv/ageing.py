"""The order in which branches that nothing reads give way, and for how long they are kept.

A branch is kept for as long as sessions take to come back, or for as long as its client told. A
shorter time ends it sooner; a longer one pins it: it gives way before what is kept anyway, and all
pins together hold half of the pool, of which each tenant has its share. So who tells hours for all
of its sessions loses what it would have lost without, and others lose no more.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator

from scheduler_svc.core.kv.branches import NO_BRANCH, Branch
from scheduler_svc.core.kv.return_gaps import ReturnGaps

_Entry = tuple[int, int]  # (use, branch); entries of earlier uses of a branch are void


class Ageing:
    """Uses of branches, oldest first: of those kept, of those pinned, and of the others."""

    def __init__(self, branches: dict[int, Branch], gaps: ReturnGaps, num_blocks: int) -> None:
        self._branches = branches
        self._gaps = gaps
        self._most_pinned = num_blocks // 2
        self._num_uses = 0
        self.idle: deque[_Entry] = deque()
        self.pinned: deque[_Entry] = deque()
        self.stale: deque[_Entry] = deque()
        self._ends: list[tuple[float, int, int]] = []  # heap of (time, use, branch)
        self._num_pinned: Counter[str] = Counter()  # blocks, by tenant

    def use(self, name: int, now_s: float) -> None:
        """Counts a branch as used now."""
        self._num_uses += 1
        branch = self._branches[name]
        self.unpin(branch)
        branch.last_use, branch.last_use_s = self._num_uses, now_s
        self.idle.append((self._num_uses, name))
        if branch.told.ttl_s is not None:
            heapq.heappush(self._ends, (now_s + branch.told.ttl_s, self._num_uses, name))
        if len(self.idle) > 2 * len(self._branches) + 64:
            self.idle = deque(entry for entry in self.idle if self._is_current(entry))
        if len(self._ends) > 2 * len(self._branches) + 64:
            self._ends = [entry for entry in self._ends if self._is_current(entry[1:])]
            heapq.heapify(self._ends)

    def take_aged(self, now_s: float) -> Iterator[Branch]:
        """Yields the kept branches that are kept no longer."""
        while self._ends and self._ends[0][0] <= now_s:
            entry = heapq.heappop(self._ends)[1:]
            yield from self._let_go(entry)
        until_s = now_s - self._gaps.horizon_s
        while self.idle:
            entry = self.idle[0]
            if self._is_current(entry):
                branch = self._branches[entry[1]]
                if branch.last_use_s > until_s:
                    return
                if not self._pin(entry, branch, now_s):
                    yield from self._let_go(entry)
            self.idle.popleft()

    def _let_go(self, entry: _Entry) -> Iterator[Branch]:
        branch = self._branches.get(entry[1])
        if branch is None or branch.last_use != entry[0] or branch.num_expecting:
            return
        self.unpin(branch)
        if branch.is_kept:
            self.stale.append(entry)
            yield branch

    def _pin(self, entry: _Entry, branch: Branch, now_s: float) -> bool:
        """Keeps a branch for longer if its client told so, and has room for it."""
        ttl_s, tenant = branch.told.ttl_s, branch.told.tenant
        if ttl_s is None or branch.last_use_s + ttl_s <= now_s or not branch.is_kept:
            return False
        if branch.num_expecting:
            return False
        num_tenants = len(self._num_pinned) + (tenant not in self._num_pinned)
        share = self._most_pinned // num_tenants
        if self._num_pinned[tenant] + branch.num_blocks > share:
            self._drop_if_none(tenant)
            return False
        branch.num_pinned = branch.num_blocks
        self._num_pinned[tenant] += branch.num_pinned
        self.pinned.append(entry)
        return True

    def unpin(self, branch: Branch) -> None:
        """Counts a branch as pinned no longer."""
        if branch.num_pinned:
            self._num_pinned[branch.told.tenant] -= branch.num_pinned
            branch.num_pinned = 0
            self._drop_if_none(branch.told.tenant)

    def _drop_if_none(self, tenant: str) -> None:
        if not self._num_pinned[tenant]:
            del self._num_pinned[tenant]

    def oldest_let_go(self) -> int:
        """The idle branch to be handed out first of those that sessions' habits do not keep."""
        return self._oldest(self.stale) or self._oldest(self.pinned)

    def oldest_idle(self) -> int:
        """The branch that was used longest ago of those that are kept; NO_BRANCH: none is idle."""
        return self._oldest(self.idle)

    def _oldest(self, entries: deque[_Entry]) -> int:
        """The branch that was used longest ago of those that are idle; NO_BRANCH: none is."""
        while entries:
            name = entries[0][1]
            branch = self._branches.get(name)
            if branch is not None and self._is_idle(entries[0], branch):
                return name
            entries.popleft()  # it comes back when its blocks are released, or not awaited
        return NO_BRANCH

    def _is_idle(self, entry: _Entry, branch: Branch) -> bool:
        """True if a branch has free blocks, and was neither used nor awaited since."""
        is_last = bool(branch.last_use == entry[0])
        return is_last and bool(branch.num_free) and not branch.num_expecting

    def _is_current(self, entry: _Entry) -> bool:
        branch = self._branches.get(entry[1])
        return branch is not None and bool(branch.last_use == entry[0])
