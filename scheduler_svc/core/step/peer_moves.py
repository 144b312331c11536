"""Moves of sequences with their KV between worker groups, as the shell sees them.

At the source: `begin_move` takes a sequence from its slot, `Migration.migrate_moved` hands it out
once its KV is computed, `give_back` frees its blocks. At the receiver: `Migration.migrate_in`
begins the pull, `take_pulls` has its orders, `pull_done` and `source_lost` end it, and
`take_ended_loans` says what to give back. No answer is needed to go on: what does not come is
computed.
"""

from scheduler_svc.core.kv.loans import Leaving
from scheduler_svc.core.kv.pulls import LentBlocks, PullCounts, PullOrders
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.step.grants import Grants
from scheduler_svc.core.step.reuse import Reuse
from scheduler_svc.core.step.state import SchedulerState


class PeerMoves:
    """Orders out, answers in."""

    def __init__(
        self,
        state: SchedulerState,
        live: dict[str, Sequence],
        grants: Grants,
    ) -> None:
        self._state = state
        self._live = live
        self._grants = grants

    # --- the source ------------------------------------------------------------------------------

    @property
    def may_move(self) -> bool:
        """True if blocks alone are what sequences have here."""
        config = self._state.config
        return len(config.groups) == 1 and not config.has_window and not config.has_states

    def begin_move(self, request_id: str) -> bool:
        """Takes a running sequence from its slot; its blocks are held until it is given back.

        False if it cannot leave now: it does not run, computes alone, or has drafts in flight.
        """
        state, sequence = self._state, self._live.get(request_id)
        if sequence is None or sequence.status is not Status.RUNNING or sequence.is_suspect:
            return False
        slot, table = sequence.slot, state.table
        assert slot is not None
        num_computed = int(table.num_computed[slot])
        if not self.may_move or not num_computed or slot in table.drafting_slots:
            return False
        num_blocks = -(-num_computed // state.config.block_size)
        block_ids = table.blocks(slot)[:num_blocks]
        state.transfer_counts.num_ordered += 1
        loan_id = state.transfer_counts.num_ordered
        last_step = int(table.last_step[slot])
        state.loans.begin(Leaving(loan_id, sequence, block_ids, num_computed, last_step))
        state.leave(sequence, Status.PREEMPTED)
        state.await_move(sequence, loan_id)
        self._grants.left()
        state.renew_running()
        return True

    def give_back(self, loan_id: int) -> None:
        """Frees the blocks of a sequence that has moved; no effect after the worker was lost."""
        self._state.loans.give_back(loan_id)

    # --- the receiver ----------------------------------------------------------------------------

    @property
    def counts(self) -> PullCounts:
        """Totals since start."""
        return self._state.pull_counts

    @property
    def num_in_flight(self) -> int:
        """Number of pulls that were ordered and not answered."""
        return len(self._state.pulls)

    @property
    def next_due_s(self) -> float | None:
        """The earliest time at which a pull has taken too long; None when none is awaited."""
        return self._state.pulls.next_due_s

    @property
    def num_lent(self) -> int:
        """Number of loans that were not given back."""
        return len(self._state.loans)

    def has_room(self, num_sequences: int, num_blocks: int) -> bool:
        """True if so many more sequences could enter here soon, with so many blocks in all."""
        state = self._state
        if state.is_worker_away or state.is_closed or not self.may_move:
            return False
        num_slots = len(state.free_slots) - state.pulls.num_entering
        # A block more for each of those that run then: they go on without a preemption at once.
        num_running = len(state.running.sequences) + num_sequences
        return num_sequences <= num_slots and num_blocks + num_running <= state.pool.num_free

    def take_pulls(self, s_per_block: float = 0.0) -> PullOrders | None:
        """Returns what the worker should pull, or need not any more; None: nothing new.

        `s_per_block` is what a block took lately, in seconds; 0: none was measured. The worker
        answers each pull with `pull_done`.
        """
        return self._state.pulls.take(self._state.now_s, s_per_block)

    def pull_done(self, transfer_id: int, num_blocks: int) -> None:
        """Uses the first `num_blocks` of a pull's blocks, and queues who waited for them."""
        self._state.pulls.done(transfer_id, num_blocks)
        self._state.queue_fetched((transfer_id,))

    def expire(self) -> None:
        """Cancels the pulls that have taken too long; their sequences compute instead."""
        self._void(self._state.pulls.overdue(self._state.now_s))

    def source_lost(self, source: str) -> None:
        """Makes the pulls from a group void: its memory may be another's by now."""
        self._void(self._state.pulls.of_source(source))

    def _void(self, transfer_ids: list[int]) -> None:
        for transfer_id in transfer_ids:
            self._state.pulls.cancel(transfer_id)
        if transfer_ids:
            self._state.queue_fetched(transfer_ids)

    def take_ended_loans(self) -> list[LentBlocks]:
        """Removes and returns the loans that are not needed any more; no plan depends on them."""
        ended = list(self._state.ended_loans)
        self._state.ended_loans.clear()
        return ended


def begin_pull(state: SchedulerState, sequence: Sequence, lent: LentBlocks) -> bool:
    """Orders the KV that is lent to a new sequence, which awaits it; False if it should compute."""
    config, shared = state.config, list[int]()
    if state.is_worker_away or len(config.groups) != 1 or config.has_window or config.has_states:
        state.ended_loans.append(lent)
        return False
    if config.enable_prefix_caching and not sequence.is_private:
        shared = Reuse(config, state).cached(sequence).shared
    shared = shared[: lent.num_tokens // config.block_size]
    transfer_id = state.pulls.begin(sequence, lent, shared)
    if transfer_id is None:
        return False
    state.await_move(sequence, transfer_id)
    return True
