"""Migration of sequences from one scheduler to another; known tokens are enough to continue.

A worker group that is lost migrates all its sequences; other groups take them over as if they had
been preempted there. A sequence moves with its request, tokens, limits and timeline.
"""

from scheduler_svc.core.kv.sliding_window import blocks_needed
from scheduler_svc.core.queue.deadlines import Deadlines
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.state import SchedulerState


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
        self._live.clear()
        self._state.fork_groups.clear()
        self._state.suspects.clear()
        self._deadlines.clear()
        self.num_migrated_out += len(leaving)
        return leaving

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether a sequence can migrate to here: it fits, and its id is not live here."""
        config = self._state.config
        most = config.max_model_len + sequence.request.is_prompt_only
        num_blocks = blocks_needed(config, sequence.max_len)
        fits = sequence.max_len <= most and num_blocks <= self._state.pool.num_usable
        return fits and sequence.request.request_id not in self._live

    def migrate_in(self, sequence: Sequence) -> None:
        """Adds a sequence that migrates here from another scheduler.

        A sequence that has run goes to the front of the queue; a new one to the end.
        """
        state, has_run = self._state, sequence.has_run
        sequence.status = Status.PREEMPTED if has_run else Status.WAITING
        sequence.number = state.next_number()
        sequence.num_overtaken = 0
        sequence.forget_hashes()
        self._live[sequence.request.request_id] = sequence
        self._deadlines.add(sequence)
        state.fork_groups.add(sequence)
        if sequence.is_suspect:
            state.suspects.add(sequence)
        phase = Phase.PREEMPTED if has_run else Phase.QUEUE
        if state.is_worker_away:
            phase = Phase.WORKER_AWAY
        sequence.timeline.enter(phase, state.now_s)
        state.enqueue(sequence)
        self.num_migrated_in += 1
