"""A pool that hands out blocks by sessions: those that no turn will read first, those awaited last.

Chains of blocks form a tree. A branch of it is the blocks that one session alone has, or that
several begin with; a block belongs to one branch as soon as a sequence that held it has left. What
is ordered are branches, not blocks: of each the end of the chain goes first, since nothing after a
block that is gone can be found. Handed out are, in this order:

1. blocks of no branch: never filled, private, or superseded: their session has gone on without
   them, as after edited thinking;
2. branches unused for longer than sessions take to come back, or than their clients told, the one
   used longest ago first; one that sessions share counts as used after each of them; then those
   that only a hint keeps for longer;
3. branches that a waiting sequence reads whose turn is far, the farthest first;
4. other branches, the one used longest ago first;
5. branches that a waiting sequence reads whose turn is near.

3 to 5, and what a hint keeps, are kept: a sequence that lacks much does not take them before its
turn. No hint is needed, and none is a duty: a turn that has come takes what it lacks. Time comes
with the calls. Operations are O(1) per block, and O(log n) per waiting sequence and hint.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.core.kv.ageing import Ageing
from scheduler_svc.core.kv.block_pool import BlockPool, OutOfBlocks
from scheduler_svc.core.kv.branches import FAR, NO_BRANCH, PATIENCE, Branch, Expectation
from scheduler_svc.core.kv.named_sessions import NamedSessions
from scheduler_svc.core.kv.prefix_cache import NULL_BLOCK
from scheduler_svc.core.kv.return_gaps import ReturnGaps
from scheduler_svc.core.request.session_hint import NOTHING_TOLD, SessionKey, ToldSession


class SessionPool(BlockPool):
    """Free blocks in a list for each branch, threaded through the pool's arrays.

    List 0 is the pool's own, with the null block as its ends; that of branch n has the entry
    `num_blocks` + n of the arrays as its ends.
    """

    def __init__(self, num_blocks: int, block_size: int, *more_sizes: int) -> None:
        super().__init__(num_blocks, block_size, *more_sizes)
        self._block_size = block_size
        self._branch_of = array("i", bytes(4 * num_blocks))
        self._branches: dict[int, Branch] = {}
        self._unused: list[int] = []  # numbers of branches
        self._add_ends()  # of list 0, which has others: keeps numbers and ends in step
        self._running: dict[int, int] = {}  # branch by sequence
        self._expecting: dict[int, Expectation] = {}  # by sequence
        self._by_turn: list[tuple[int, int]] = []  # heap: (turn negated, sequence), and what was
        self.gaps = ReturnGaps()
        self._ages = Ageing(self._branches, self.gaps, num_blocks)
        self.named = NamedSessions()
        self.now_s = 0.0  # the latest time that was told
        # Tokens of prompts computed since the start; a step counts as a few at least, because
        # another's prompt could have been computed in it.
        self.work = 0
        self._next_loss = 0  # the work at which one that lacks most may take what is kept
        self.num_kept = 0  # free blocks of branches that are kept
        self.num_awaited_evicted = 0  # blocks that a waiting sequence would have found

    def _add_ends(self) -> int:
        """Makes the ends of one more list; returns its branch's number."""
        end = len(self._next)
        self._next.append(end)
        self._prev.append(end)
        return end - self.num_blocks

    # --- sequences -------------------------------------------------------------------------------

    def expect(self, number: int, found: Sequence[int], num_tokens: int) -> None:
        """Keeps the blocks that a waiting sequence of so many tokens finds.

        Its turn comes when `PATIENCE` times the work is done that it lacks: who lacks little is
        first, and who lacks much is not passed for ever.
        """
        self.not_expected(number)
        names = [name for name in dict.fromkeys(map(self._branch_of.__getitem__, found)) if name]
        for name in names:
            branch = self._branches[name]
            branch.num_expecting += 1
            self._keep(branch)
        num_blocks = -(-num_tokens // self._block_size)
        num_lacking = num_blocks - len(found)
        turn = self.work + PATIENCE * num_lacking * self._block_size
        self._expecting[number] = Expectation(turn, num_blocks, num_lacking, names)
        if names and not self._branches[names[-1]].is_shared:
            heapq.heappush(self._by_turn, (-turn, number))

    def may_enter(self, number: int) -> bool:
        """True if what a waiting sequence takes is not kept for others, or its turn has come.

        Those that lack most of their tokens, one after the other, wait for `PATIENCE` times the
        work that the one before took, so that no more of all work than that goes into what was
        lost.
        """
        expectation = self._expecting[number]
        if self._is_harmless(expectation):
            return True
        turn = expectation.turn
        return self.work >= (max(turn, self._next_loss) if expectation.lacks_most else turn)

    def _is_harmless(self, expectation: Expectation) -> bool:
        return expectation.num_lacking <= self.num_free - self.num_kept

    def let_age(self) -> None:
        """Keeps no longer what is unused for longer than sessions take to come back."""
        for branch in self._ages.take_aged(self.now_s):
            branch.is_kept = False
            self.num_kept -= branch.num_free

    def _keep(self, branch: Branch) -> None:
        if not branch.is_kept:
            branch.is_kept = True
            self.num_kept += branch.num_free

    def not_expected(self, number: int) -> None:
        """Lets go of what was kept for a sequence, if anything was."""
        expectation = self._expecting.pop(number, None)
        if expectation is None:
            return
        for name in reversed(expectation.branches):
            branch = self._branches[name]
            branch.num_expecting -= 1
            if not branch.num_expecting:
                self._use(name)
                self._recycle_if_empty(name)

    def turn_of(self, number: int) -> int:
        """The turn of a waiting sequence, later by what was taken from it."""
        return self._expecting[number].turn

    def enter(
        self,
        number: int,
        arrival_s: float,
        last: int | None,
        shared: Sequence[int],
        told: ToldSession = NOTHING_TOLD,
    ) -> None:
        """Gives a branch to a sequence that has just shared blocks, `last` the chain's last one.

        It goes on with that of the session whose blocks it shares, if all but those of the last
        answer are among them, or with that of its name, if it begins as it did, or begins one.
        """
        self._count_loss(number)
        self.not_expected(number)
        before = NO_BRANCH if last is None else self._branch_of[last]
        name = self._continued(before, shared, told)
        branch = self._branches.get(name)
        if branch is not None:
            self._supersede_rest(name, branch)
            self.gaps.observe(max(arrival_s - branch.left_s, 0.0))
        else:
            base = self._branches.get(before)
            if last is not None and (base is None or not base.is_shared):
                before = self._share_branch(before, shared)
            name, branch = self._new_branch(is_shared=False)
            branch.base = before
        self._ages.unpin(branch)
        branch.is_running, branch.told = True, told
        self._running[number] = name
        if told.key is not None:
            self.named.tell(told.key, name)
        self._use_parent(told)

    def _continued(self, before: int, shared: Sequence[int], told: ToldSession) -> int:
        """The branch with which a sequence goes on; NO_BRANCH: it begins one.

        Under its name a session may have lost its end, as by edited thinking or compaction. What
        begins otherwise is another request, such as one for its title, whatever it says.
        """
        branch = self._branches.get(before)
        is_other = self.named.is_other(told.key, before)
        if branch is not None and not is_other and self._goes_on(before, branch, shared):
            return before
        name = self.named.branch_of(told.key)
        own = self._branches.get(name)
        if own is None or own.is_running or before == NO_BRANCH or before not in (name, own.base):
            return NO_BRANCH
        return name

    def count_turn(self, number: int, num_prompt_tokens: int, num_found_tokens: int) -> None:
        """Counts a turn that has entered for the first time, with its tokens."""
        branch = self._branches[self._running[number]]
        branch.num_turns += 1
        branch.num_prompt_tokens += num_prompt_tokens
        branch.num_found_tokens += num_found_tokens

    def known_sessions(self) -> Iterator[tuple[str, Branch]]:
        """Yields the name, or an empty one, and the branch of each session with a turn."""
        for name, branch in self._branches.items():
            if branch.num_turns:
                yield self.named.name_of(name), branch

    def _use_parent(self, told: ToldSession) -> None:
        """Counts a session that awaits another one as used with it."""
        name = self.named.branch_of(told.parent)
        if name and not self._branches[name].is_running:
            self._use(name)

    def end(self, key: SessionKey) -> None:
        """Keeps nothing more of a session, unless a turn of it waits; unknown ones are ignored."""
        name = self.named.branch_of(key)
        branch = self._branches.get(name)
        if branch is None or branch.num_expecting:
            return
        self.named.forget(name)
        if branch.is_running:
            branch.told = replace(branch.told, ttl_s=0.0)
        else:
            self._supersede_rest(name, branch)
            self._recycle_if_empty(name)

    def _count_loss(self, number: int) -> None:
        expectation = self._expecting.get(number)
        if expectation is None or not expectation.lacks_most or self._is_harmless(expectation):
            return
        work = PATIENCE * expectation.num_lacking * self._block_size
        self._next_loss = max(self._next_loss, self.work) + work

    def _goes_on(self, name: int, branch: Branch, shared: Sequence[int]) -> bool:
        if branch.is_shared or branch.is_running:
            return False
        num_found = sum(self._branch_of[block_id] == name for block_id in shared)
        return branch.num_blocks - num_found <= branch.slack

    def leave(
        self, number: int, block_ids: Sequence[int], num_answer_blocks: int, *, is_over: bool = True
    ) -> None:
        """Gives the blocks that a sequence held, and no branch has, to its branch.

        `num_answer_blocks` of them are after its prompt. Of a session that has ended with it, none
        is left in a branch of its own.
        """
        name = self._running.pop(number, NO_BRANCH)
        if not name:
            return
        branch = self._branches[name]
        branch.is_running, branch.slack = False, num_answer_blocks
        branch.left_s = self.now_s
        if is_over and branch.told.has_ended:
            self.named.forget(name)
            self._supersede_rest(name, branch)
            branch.num_blocks -= self._move(block_ids, name, NO_BRANCH)
        else:
            branch.num_blocks += self._move(block_ids, NO_BRANCH, name)
        self._use_parent(branch.told)
        self._recycle_if_empty(name)

    def _share_branch(self, name: int, shared: Sequence[int]) -> int:
        """Makes those of these blocks that one session alone had a branch of several."""
        new, branch = self._new_branch(is_shared=True)
        branch.num_blocks = self._move(shared, name, new)
        if name:
            self._branches[name].num_blocks -= branch.num_blocks
            self._branches[name].base = new
            self._recycle_if_empty(name)
        self._recycle_if_empty(new)
        return new

    def _move(self, block_ids: Sequence[int], old: int, new: int) -> int:
        """Moves the blocks of one branch, none of which is free, to another; returns how many."""
        labels, index = np.frombuffer(self._branch_of, dtype=np.intc), np.array(block_ids, np.intp)
        index = index[labels[index] == old]
        labels[index] = new
        return len(index)

    def _supersede_rest(self, name: int, branch: Branch) -> None:
        """Moves the free blocks of a branch to the end of list 0."""
        rest = list(self._list(self.num_blocks + name))
        super().share(rest)
        self._count_free(branch, -len(rest))
        branch.num_blocks -= self._move(rest, name, NO_BRANCH)
        for block_id in rest:
            self._ref_count[block_id] = 0
            self._append(block_id)

    def _count_free(self, branch: Branch, change: int) -> None:
        branch.num_free += change
        if branch.is_kept:
            self.num_kept += change

    # --- branches --------------------------------------------------------------------------------

    def _new_branch(self, is_shared: bool) -> tuple[int, Branch]:
        name = self._unused.pop() if self._unused else self._add_ends()
        branch = self._branches[name] = Branch(is_shared)
        return name, branch

    def _recycle_if_empty(self, name: int) -> None:
        branch = self._branches[name]
        if not (branch.num_blocks or branch.is_running or branch.num_expecting):
            self._ages.unpin(branch)
            self.named.forget(name)
            del self._branches[name]
            self._unused.append(name)

    def _use(self, name: int) -> None:
        """Counts a branch as used now."""
        self._ages.use(name, self.now_s)
        self._keep(self._branches[name])

    # --- blocks ----------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"asked for {count} blocks, {self.num_free} free")
        taken: list[int] = []
        while len(taken) < count:
            most = count - len(taken)
            if self._next[NULL_BLOCK] != NULL_BLOCK:
                taken += self._take_from(NULL_BLOCK, most)
            elif name := self._ages.oldest_let_go():
                taken += self._take_from(self.num_blocks + name, most)
            elif name := self._last_awaited(self.work + FAR * self._block_size):
                taken += self._take_awaited(name, most)
            elif name := self._ages.oldest_idle():
                taken += self._take_from(self.num_blocks + name, most)
            else:
                name = self._last_awaited(0) or self._oldest_shared()
                taken += self._take_awaited(name, most)
        self.num_free -= count
        return taken

    def _last_awaited(self, least_turn: int) -> int:
        """The branch of the waiting sequence whose turn comes last, but not before `least_turn`."""
        while self._by_turn:
            turn, number = self._by_turn[0]
            expectation = self._expecting.get(number)
            if expectation is not None and expectation.turn == -turn:
                name = expectation.branches[-1]
                if self._branches[name].num_free:
                    return name if expectation.turn > least_turn else NO_BRANCH
            heapq.heappop(self._by_turn)
        return NO_BRANCH

    def _oldest_shared(self) -> int:
        """The branch used longest ago of all: what is left is shared by sequences that wait."""
        free = (name for name, branch in self._branches.items() if branch.num_free)
        return min(free, key=lambda name: self._branches[name].last_use)

    def _take_awaited(self, name: int, most: int) -> list[int]:
        """Takes blocks that a waiting sequence would find, whose turn comes later for it."""
        taken = self._take_from(self.num_blocks + name, most)
        self.num_awaited_evicted += len(taken)
        number = self._by_turn[0][1] if self._by_turn else -1
        expectation = self._expecting.get(number)
        if expectation is not None and expectation.branches[-1] == name:
            expectation.turn += PATIENCE * len(taken) * self._block_size
            expectation.num_lacking += len(taken)
            heapq.heapreplace(self._by_turn, (-expectation.turn, number))
        return taken

    def _take_from(self, end: int, most: int) -> list[int]:
        """Removes up to so many blocks from the front of a list, and evicts their content."""
        following, ref_count, branch_of = self._next, self._ref_count, self._branch_of
        evict = self._evict if self._others else self.cache.evict
        taken: list[int] = []
        block_id = following[end]
        while len(taken) < most and block_id != end:
            taken.append(block_id)
            evict(block_id)
            ref_count[block_id] = 1
            if name := branch_of[block_id]:
                branch_of[block_id] = NO_BRANCH
                branch = self._branches[name]
                branch.num_blocks -= 1
                self._count_free(branch, -1)
                self._recycle_if_empty(name)
            block_id = following[block_id]
        following[end], self._prev[block_id] = block_id, end
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        ref_count, branch_of, last = self._ref_count, self._branch_of, NO_BRANCH
        for block_id in reversed(block_ids):
            assert ref_count[block_id] > 0, f"block {block_id} released more often than held"
            ref_count[block_id] -= 1
            if ref_count[block_id]:
                continue
            name = branch_of[block_id]
            self._append(block_id, self.num_blocks + name if name else NULL_BLOCK)
            if name:
                self._count_free(self._branches[name], 1)
                if name != last:
                    self._use(name)
            last = name

    def release_filled(self, block_ids: Sequence[int]) -> None:
        name, branch = self._new_branch(is_shared=False)
        branch.num_blocks = self._move(block_ids, NO_BRANCH, name)
        self._recycle_if_empty(name)
        self.release(block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not self._ref_count[block_id] and (name := self._branch_of[block_id]):
                self._count_free(self._branches[name], -1)
        super().share(block_ids)

    def demote(self, block_id: int) -> None:
        if name := self._branch_of[block_id]:
            self._branch_of[block_id] = NO_BRANCH
            self._branches[name].num_blocks -= 1
            self._count_free(self._branches[name], -1)
            self._recycle_if_empty(name)
        super().demote(block_id)

    def free_queue(self) -> Iterator[int]:
        yield from self._list(NULL_BLOCK)
        names = sorted(self._branches, key=lambda name: self._branches[name].last_use)
        for is_awaited in (False, True):
            for name in names:
                if bool(self._branches[name].num_expecting) is is_awaited:
                    yield from self._list(self.num_blocks + name)

    def _list(self, end: int) -> Iterator[int]:
        block_id = self._next[end]
        while block_id != end:
            yield block_id
            block_id = self._next[block_id]
