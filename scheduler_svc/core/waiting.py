"""Who waits, in the order of admission: first come, first served; preempted ones go first."""

from collections import deque
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence, Status


class WaitingQueue:
    """Sequences without a slot. An aborted one is skipped when its turn comes, so abort is O(1)."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._num_tokens = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.status is not Status.FINISHED)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of everyone who waits."""
        return self._num_tokens

    def append(self, sequence: Sequence) -> None:
        """A new sequence, to the end."""
        self._queue.append(sequence)
        self._count(sequence, 1)

    def prepend(self, sequence: Sequence) -> None:
        """A preempted sequence, to the front."""
        self._queue.appendleft(sequence)
        self._count(sequence, 1)

    def peek(self) -> Sequence | None:
        """Whose turn it is."""
        while self._queue and self._queue[0].status is Status.FINISHED:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        """Takes out the one that peek returned."""
        sequence = self._queue.popleft()
        self._count(sequence, -1)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence wherever it stands; its status must be FINISHED already."""
        assert sequence.status is Status.FINISHED
        self._count(sequence, -1)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Adds a token that arrived after a waiting sequence had lost its slot."""
        sequence.append(token_id)
        self._num_tokens += 1

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._length += sign
        self._num_tokens += sign * len(sequence.token_ids)
