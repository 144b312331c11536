"""Sequences whose requirements the worker must make ready before they may enter a slot.

A worker prepares a requirement (`request.requirement`), which may take seconds or fail, apart from
its steps. Until all that a sequence requires are ready, it is PREPARING: it is in no order, delays
no other, and counts as waiting. Each requirement of each sequence is a preparation with a number of
its own, although a worker may hold what is equal once. What was prepared belongs to one stay in a
slot on one worker: a preemption or a loss starts anew.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scheduler_svc.core.request.request import Request, TokenIds
from scheduler_svc.core.request.requirement import Requirement, RequirementKind, Requirements
from scheduler_svc.core.request.sequence import NOTHING_PREPARED, Sequence, Status

_MOST_ADAPTERS = 32  # about as many as a worker keeps in its memory


@dataclass(frozen=True, slots=True)
class Preparation:
    """A requirement to prepare; a grammar up to the place that the output so far has reached."""

    preparation_id: int
    requirement: Requirement
    request: Request
    output_token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Preparations:
    """Orders to the worker about requirements."""

    wanted: tuple[Preparation, ...]
    dropped_ids: tuple[int, ...]  # asked for before, and not needed any more


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that cannot have what it requires, to be ended."""

    sequence: Sequence
    requirement: Requirement


class RequirementWaits:
    """Sequences that wait for their requirements, and those in the queue whose are ready."""

    def __init__(self, kinds: tuple[RequirementKind, ...], max_prepared: int) -> None:
        """`kinds` are those that the worker prepares; a requirement of another is not awaited."""
        self._kinds = kinds
        self._max_prepared = max_prepared  # sequences asked for or ready; the others wait to be
        self._not_asked: dict[Sequence, None] = {}  # in order
        self._asked: dict[Sequence, int] = {}  # in order; to the number of answers that it awaits
        self._queued: dict[Sequence, None] = {}  # in the queue, not in a slot; all are ready
        self._unanswered: dict[int, Sequence] = {}  # by preparation id
        self._ready: dict[int, Sequence] = {}
        self._dropped: list[int] = []
        self._last_id = 0
        # Adapters that the worker has had, the last used last; it may have forgotten old ones.
        self._adapters: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._not_asked) + len(self._asked)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait for their requirements, those asked for first."""
        yield from self._asked
        yield from self._not_asked

    @property
    def num_ready(self) -> int:
        """Number of sequences in the queue whose requirements are ready."""
        return len(self._queued)

    @property
    def has_news(self) -> bool:
        """True if `take` would return something."""
        return bool(self._dropped) or (self._has_room and bool(self._not_asked))

    @property
    def _has_room(self) -> bool:
        return len(self._asked) + len(self._queued) < self._max_prepared

    def awaited(self, request: Request) -> Requirements:
        """The requirements of a request that this worker prepares."""
        return tuple(one for one in request.requirements if one.kind in self._kinds)

    def has_had_adapter(self, adapter_id: str) -> bool:
        """True if the worker has prepared this adapter, as one of the last."""
        return adapter_id in self._adapters

    def must_wait(self, sequence: Sequence) -> bool:
        """True if a sequence without a slot may not enter one before something is ready."""
        if not sequence.request.requirements or sequence.preparations:
            return False
        return bool(self.awaited(sequence.request))

    def hold(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its requirements."""
        sequence.status = Status.PREPARING
        sequence.preparations = NOTHING_PREPARED
        self._not_asked[sequence] = None

    def take(self) -> Preparations | None:
        """Returns the orders to the worker for now; None when there are none."""
        wanted: list[Preparation] = []
        while self._not_asked and self._has_room:
            sequence = next(iter(self._not_asked))
            del self._not_asked[sequence]
            wanted += self._ask_for(sequence)
        dropped, self._dropped = self._dropped, []
        return Preparations(tuple(wanted), tuple(dropped)) if wanted or dropped else None

    def _ask_for(self, sequence: Sequence) -> Iterator[Preparation]:
        output, asked = sequence.token_ids[sequence.num_prompt :], dict[Requirement, int]()
        for requirement in self.awaited(sequence.request):
            self._last_id += 1
            asked[requirement] = self._last_id
            self._unanswered[self._last_id] = sequence
            yield Preparation(self._last_id, requirement, sequence.request, output)
        sequence.preparations = asked
        self._asked[sequence] = len(asked)

    def prepared(self, preparation_id: int) -> Sequence | None:
        """Takes out the sequence whose last requirement is ready; None if it waits on, or not."""
        sequence = self._unanswered.pop(preparation_id, None)
        if sequence is None:
            return None
        self._ready[preparation_id] = sequence
        if adapter_id := sequence.request.adapter_id:
            self._adapters.pop(adapter_id, None)
            self._adapters[adapter_id] = None
            if len(self._adapters) > _MOST_ADAPTERS:
                del self._adapters[next(iter(self._adapters))]
        self._asked[sequence] -= 1
        if self._asked[sequence]:
            return None
        del self._asked[sequence]
        self._queued[sequence] = None
        sequence.status = Status.PREEMPTED if sequence.has_run else Status.WAITING
        return sequence

    def failed(self, preparation_id: int) -> Failure | None:
        """The sequence whose requirement cannot be prepared; None if it has ended.

        The caller ends it, and what else was asked for it is dropped.
        """
        sequence = self._unanswered.pop(preparation_id, None)
        if sequence is not None:
            by_id = {number: one for one, number in sequence.preparations.items()}
            return Failure(sequence, by_id[preparation_id])
        if preparation_id in self._dropped:  # the worker holds nothing of it to be dropped
            self._dropped.remove(preparation_id)
        return None

    def entered(self, sequence: Sequence) -> Mapping[Requirement, int]:
        """Returns the preparations that an entering sequence uses up."""
        used, sequence.preparations = sequence.preparations, NOTHING_PREPARED
        if used:
            del self._queued[sequence]
            for preparation_id in used.values():
                del self._ready[preparation_id]
        return used

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended or moved away; no effect if it required nothing."""
        for waiting in (self._not_asked, self._asked, self._queued):
            waiting.pop(sequence, None)
        asked, sequence.preparations = sequence.preparations, NOTHING_PREPARED
        for number in asked.values():
            known = self._unanswered.pop(number, None) or self._ready.pop(number, None)
            if known is not None:
                self._dropped.append(number)

    def clear(self) -> None:
        """Removes all sequences."""
        self._not_asked, self._asked, self._queued = {}, {}, {}
        self._unanswered, self._ready, self._dropped = {}, {}, []
        self._adapters = {}

    def worker_lost(self) -> None:
        """Everything prepared is gone: those who were asked for wait to be asked for again.

        A sequence in the queue waits there, and starts to wait for its requirements at its turn.
        """
        for sequence in (*self._asked, *self._queued):
            sequence.preparations = NOTHING_PREPARED
        not_asked = dict.fromkeys(self._asked) | self._not_asked
        self.clear()
        self._not_asked = not_asked
