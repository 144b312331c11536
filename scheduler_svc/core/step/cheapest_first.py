"""Takes from the queue first who has least to compute, of those among whom its order is by arrival.

Sequences of one tenant and one priority change places; between others the queue's order holds, and
one that was preempted is never passed. How long one may be passed, `SessionPool.expect` says.
"""

from scheduler_svc.core.kv.session_pool import SessionPool
from scheduler_svc.core.queue.waiting import WaitingQueue
from scheduler_svc.core.request.sequence import Sequence, Status

MAX_COMPARED = 64  # the first of the queue


class CheapestFirst:
    """The first sequences of a queue while a step is drafted, by turn."""

    def __init__(self, waiting: WaitingQueue, sessions: SessionPool) -> None:
        self._waiting = waiting
        self._sessions = sessions
        self._compared: list[Sequence] = []  # in the queue's order
        self._by_turn: list[Sequence] = []  # those of them that were not taken, the next one last

    def take(self) -> Sequence | None:
        """Removes and returns the next sequence; None when there is none."""
        if not self._by_turn:
            self._compare()
        return self._by_turn.pop() if self._by_turn else None

    def put_back(self) -> None:
        """Returns to the queue those that were compared and not taken."""
        left = {sequence.number for sequence in self._by_turn}
        for sequence in reversed(self._compared):
            if sequence.number in left:
                self._waiting.put_back(sequence)
        self._compared, self._by_turn = [], []

    def _compare(self) -> None:
        first = self._waiting.take()
        self._compared = compared = [] if first is None else [first]
        while first is not None and len(compared) < MAX_COMPARED:
            sequence = self._waiting.take()
            if sequence is None:
                break
            if not _are_alike(first, sequence):
                self._waiting.put_back(sequence)
                break
            compared.append(sequence)
        self._by_turn = sorted(compared, key=self._place)[::-1]

    def _place(self, sequence: Sequence) -> tuple[bool, int]:
        number = sequence.number
        return not self._sessions.may_enter(number), self._sessions.turn_of(number)


def _are_alike(first: Sequence, other: Sequence) -> bool:
    """True if nothing but their arrival says which is first.

    A suspect has a step of its own at its turn; taken before its turn it would hold up the others.
    """
    one, two = first.request, other.request
    is_new = first.status is Status.WAITING and other.status is Status.WAITING
    is_new = is_new and not first.is_suspect and not other.is_suspect
    return is_new and one.tenant == two.tenant and one.priority == two.priority
