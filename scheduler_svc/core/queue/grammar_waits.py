"""Sequences whose grammar the worker must prepare before they may enter a slot.

A worker reads a grammar, which may take seconds or fail, apart from its steps. Until it has, the
sequence is WAITING_FOR_GRAMMAR: it is in no order, delays no other, and counts as waiting. What was
prepared belongs to one stay in a slot on one worker: a preemption or a loss starts anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.request.request import Request, TokenIds
from scheduler_svc.core.request.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Preparation:
    """A grammar to prepare, up to the place that the output so far has reached."""

    preparation_id: int
    request: Request
    output_token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Preparations:
    """What the worker should do about grammars."""

    wanted: tuple[Preparation, ...]
    dropped_ids: tuple[int, ...]  # asked for before, and not needed any more


class GrammarWaits:
    """Sequences that wait for their grammar, and those whose grammar is ready for their entry."""

    def __init__(self, max_prepared: int) -> None:
        self._max_prepared = max_prepared  # asked for or ready; the others wait to be asked for
        self._not_asked: dict[Sequence, None] = {}  # in order
        self._asked: dict[int, Sequence] = {}  # by preparation id
        self._ready: dict[int, Sequence] = {}  # in the queue, not in a slot
        self._dropped: list[int] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._not_asked) + len(self._asked)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait for their grammar, those asked for first."""
        yield from self._asked.values()
        yield from self._not_asked

    @property
    def num_ready(self) -> int:
        """Number of sequences in the queue whose grammar is ready."""
        return len(self._ready)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something."""
        has_room = len(self._asked) + len(self._ready) < self._max_prepared
        return bool(self._dropped) or (has_room and bool(self._not_asked))

    def hold(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its grammar."""
        sequence.status = Status.WAITING_FOR_GRAMMAR
        sequence.preparation_id = 0
        self._not_asked[sequence] = None

    def take(self) -> Preparations | None:
        """What to ask the worker for now; None when there is nothing."""
        wanted = []
        while self._not_asked and len(self._asked) + len(self._ready) < self._max_prepared:
            sequence = next(iter(self._not_asked))
            del self._not_asked[sequence]
            self._last_id += 1
            sequence.preparation_id = self._last_id
            self._asked[self._last_id] = sequence
            output = sequence.token_ids[sequence.num_prompt :]
            wanted.append(Preparation(self._last_id, sequence.request, output))
        dropped, self._dropped = self._dropped, []
        return Preparations(tuple(wanted), tuple(dropped)) if wanted or dropped else None

    def prepared(self, preparation_id: int) -> Sequence | None:
        """Takes out the sequence whose grammar is ready; None if it does not wait any more."""
        sequence = self._asked.pop(preparation_id, None)
        if sequence is not None:
            self._ready[preparation_id] = sequence
            sequence.status = Status.PREEMPTED if sequence.has_run else Status.WAITING
        return sequence

    def failed(self, preparation_id: int) -> Sequence | None:
        """The sequence whose grammar cannot be prepared, to be ended; None if it has ended."""
        sequence = self._asked.pop(preparation_id, None)
        if sequence is not None:
            sequence.preparation_id = 0
        elif preparation_id in self._dropped:  # the worker holds nothing of it to be dropped
            self._dropped.remove(preparation_id)
        return sequence

    def entered(self, sequence: Sequence) -> int:
        """Returns the preparation that an entering sequence uses up; 0: it has none."""
        preparation_id, sequence.preparation_id = sequence.preparation_id, 0
        self._ready.pop(preparation_id, None)
        return preparation_id

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended or moved away; no effect if it had no grammar."""
        self._not_asked.pop(sequence, None)
        preparation_id, sequence.preparation_id = sequence.preparation_id, 0
        known = self._asked.pop(preparation_id, None) or self._ready.pop(preparation_id, None)
        if known is not None:
            self._dropped.append(preparation_id)

    def clear(self) -> None:
        """Removes all sequences."""
        self._not_asked, self._asked, self._ready, self._dropped = {}, {}, {}, []

    def worker_lost(self) -> None:
        """Everything prepared is gone: those who were asked for wait to be asked for again.

        A sequence in the queue waits there, and starts to wait for its grammar at its turn.
        """
        for sequence in (*self._asked.values(), *self._ready.values()):
            sequence.preparation_id = 0
        self._not_asked = dict.fromkeys(self._asked.values()) | self._not_asked
        self._asked, self._ready, self._dropped = {}, {}, []
