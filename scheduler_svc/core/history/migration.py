"""Migration of sequences from one scheduler to another; known tokens are enough to continue.

A worker group that is lost hands over all its sequences; other groups adopt them as if they had
been preempted there. A sequence moves with its request, tokens, limits and timeline.
"""

from scheduler_svc.core.kv.sliding_window import blocks_needed
from scheduler_svc.core.queue.deadlines import Deadlines
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.state import Residency


class Moving:
    """Moves sequences out of and into one scheduler."""

    def __init__(
        self, residency: Residency, live: dict[str, Sequence], deadlines: Deadlines
    ) -> None:
        self._residency = residency
        self._live = live
        self._deadlines = deadlines
        self.num_handed_over = 0
        self.num_adopted = 0

    def hand_over(self) -> list[Sequence]:
        """Removes and returns all sequences, in queue order; only valid after `worker_lost`."""
        assert not self._residency.roster.sequences
        leaving = []
        while (sequence := self._residency.waiting.take()) is not None:
            leaving.append(sequence)
        assert len(leaving) == len(self._live)
        self._live.clear()
        self._residency.siblings.clear()
        self._deadlines.clear()
        self.num_handed_over += len(leaving)
        return leaving

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether a sequence can be adopted: it fits, and its id is not live here."""
        config = self._residency.config
        most = config.max_model_len + sequence.request.is_prompt_only
        num_blocks = blocks_needed(config, sequence.max_len)
        fits = sequence.max_len <= most and num_blocks <= self._residency.pool.num_usable
        return fits and sequence.request.request_id not in self._live

    def adopt(self, sequence: Sequence) -> None:
        """Adds a sequence that another scheduler handed over.

        A sequence that has run goes to the front of the queue; a new one to the end.
        """
        residency, has_run = self._residency, sequence.status is Status.PREEMPTED
        sequence.number = residency.next_number()
        sequence.num_overtaken = 0
        sequence.forget_hashes()
        self._live[sequence.request.request_id] = sequence
        self._deadlines.add(sequence)
        residency.siblings.add(sequence)
        if has_run:
            residency.waiting.put_back(sequence)
        else:
            residency.waiting.append(sequence)
        phase = Phase.PREEMPTED if has_run else Phase.QUEUE
        if residency.is_worker_away:
            phase = Phase.WORKER_AWAY
        sequence.timeline.enter(phase, residency.now_s)
        self.num_adopted += 1
