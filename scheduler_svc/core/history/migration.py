"""Migration of sequences from one scheduler to another; known tokens are enough to continue.

A worker group that is lost migrates all its sequences; other groups take them over as if they had
been preempted there. One that is drained is closed: those that wait migrate, and those that run
finish. A sequence moves with its request, tokens, limits and timeline.
"""

from dataclasses import dataclass

from scheduler_svc.core.kv.pulls import LentBlocks
from scheduler_svc.core.queue.deadlines import Deadlines
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.peer_moves import begin_pull
from scheduler_svc.core.step.state import SchedulerState


@dataclass(frozen=True, slots=True)
class MovedSequence:
    """A sequence that has left with its KV, which is in blocks that are lent to it."""

    sequence: Sequence
    lent: LentBlocks


class Migration:
    """Moves sequences out of and into one scheduler."""

    def __init__(
        self, state: SchedulerState, live: dict[str, Sequence], deadlines: Deadlines
    ) -> None:
        self._state = state
        self._live = live
        self._deadlines = deadlines
        self.num_migrated_out = 0
        self.num_migrated_in = 0

    def migrate_out(self) -> list[Sequence]:
        """Removes and returns all sequences, in queue order; only valid after `worker_lost`."""
        assert not self._state.running.sequences
        leaving = []
        while (sequence := self._state.waiting.take()) is not None:
            leaving.append(sequence)
        leaving += self._state.waiting.take_held()
        assert len(leaving) == len(self._live)
        for sequence in leaving:
            self._state.no_longer_waits(sequence)
        self._live.clear()
        self._state.fork_groups.clear()
        self._state.suspects.clear()
        self._deadlines.clear()
        self.num_migrated_out += len(leaving)
        return leaving

    def close(self) -> None:
        """Lets no sequence enter that has not run here, until `reopen`."""
        self._state.is_closed = True

    def reopen(self) -> None:
        """Lets sequences enter again."""
        self._state.is_closed = False

    def migrate_waiting(self) -> list[Sequence]:
        """Removes and returns the waiting sequences, in queue order; the worker goes on.

        One that a step in flight may still bring something stays.
        """
        state, leaving = self._state, list[Sequence]()
        moving = state.loans.sequences
        staying = [s for s in state.waiting if self._awaits_a_step(s) and s not in moving]
        while (sequence := state.waiting.take()) is not None:
            leaving.append(sequence)
        leaving += state.waiting.take_held(moving)
        if state.transfers is not None:
            state.transfers.cancel_fetches(())
        for sequence in reversed(staying):
            leaving.remove(sequence)
            state.enqueue(sequence)
        for sequence in leaving:
            self._let_go(sequence)
        self._deadlines.restart(self._live.values())
        self.num_migrated_out += len(leaving)
        return leaving

    def migrate_moved(self, source: str) -> list[MovedSequence]:
        """Removes and returns the sequences that leave with their KV, once that is computed.

        Their blocks stay lent, by this group under the name `source`.
        """
        state, moved = self._state, list[MovedSequence]()
        for leaving in state.loans.due(state.acked_step):
            sequence, is_private = leaving.sequence, leaving.sequence.is_private
            # Granted steps that were taken back counted as computed when it left its slot.
            num_tokens = min(leaving.num_computed, len(sequence.token_ids) - 1)
            num_blocks = -(-num_tokens // state.config.block_size)
            block_ids = leaving.block_ids[:num_blocks]
            state.loans.left(leaving.loan_id)
            state.waiting.take_awaiting(sequence)
            self._let_go(sequence)
            sequence.is_private = is_private  # for its KV goes along
            lent = LentBlocks(source, leaving.loan_id, block_ids, num_tokens)
            moved.append(MovedSequence(sequence, lent))
        if moved:
            self._deadlines.restart(self._live.values())
            self.num_migrated_out += len(moved)
        return moved

    def _awaits_a_step(self, sequence: Sequence) -> bool:
        awaits_reports = (
            sequence.num_prompt_outputs_planned != sequence.num_prompt_outputs_delivered
        )
        return awaits_reports or sequence in self._state.departed.values()

    def _let_go(self, sequence: Sequence) -> None:
        state = self._state
        del self._live[sequence.request.request_id]
        state.requirements.discard(sequence)
        state.fork_groups.remove(sequence)
        state.suspects.discard(sequence)
        state.host.release(sequence)
        state.stop_fetching(sequence, was_awaited=False)
        state.no_longer_waits(sequence)
        sequence.lose_kv()

    def can_hold(self, sequence: Sequence) -> bool:
        """True if a sequence can migrate to here: it fits, and its id is not live here."""
        config = self._state.config
        most = config.max_model_len + sequence.request.is_prompt_only
        num_blocks = config.blocks_needed(sequence.max_len)
        fits = sequence.max_len <= most and num_blocks <= self._state.pool.num_usable
        fits = fits and config.requirements_problem(sequence.request.requirements) is None
        return fits and sequence.request.request_id not in self._live

    def migrate_in(self, sequence: Sequence, lent: LentBlocks | None = None) -> None:
        """Adds a sequence that migrates here from another scheduler.

        A sequence that has run goes to the front of the queue, a new one to the end; with blocks
        that are lent to it, once their content was pulled, if there is room for that.
        """
        state, has_run = self._state, sequence.has_run
        sequence.status = Status.PREEMPTED if has_run else Status.WAITING
        sequence.number = state.next_number()
        sequence.num_overtaken = 0
        sequence.forget_hashes(state.config.hash_namespace, state.config.weights_version)
        self._live[sequence.request.request_id] = sequence
        self._deadlines.add(sequence)
        state.fork_groups.add(sequence)
        if sequence.is_suspect:
            state.suspects.add(sequence)
        phase = Phase.PREEMPTED if has_run else Phase.QUEUE
        if state.is_worker_away:
            phase = Phase.WORKER_AWAY
        sequence.timeline.enter(phase, state.now_s)
        if lent is None or not begin_pull(state, sequence, lent):
            state.enqueue(sequence)
        self.num_migrated_in += 1
