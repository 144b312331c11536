"""Moves running requests with their KV from worker groups that are drained to others.

A request leaves its slot only when another group has room for it, and goes on there once its KV was
pulled; its client sees a pause. References are kept at both ends: the source's blocks are given
back once the receiver has answered, or its stream has ended. What cannot be moved is computed
again, or finishes where it is.
"""

import logging
import time
from dataclasses import dataclass

from pagewire.v1 import worker_pb2
from scheduler_svc.core import Scheduler, Sequence, Status
from scheduler_svc.core.history.migration import MovedSequence
from scheduler_svc.group import WorkerGroup
from scheduler_svc.places import Place, ranked

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Promise:
    """Room that one request will take when it has left its group."""

    source: str
    target: WorkerGroup
    num_blocks: int


class Moves:
    """The moves between all groups of one scheduler."""

    def __init__(self, groups: list[WorkerGroup]) -> None:
        self._groups = groups  # as they come and go
        self._promises: dict[str, _Promise] = {}  # by id of a request that leaves
        self._told: set[tuple[bytes, bytes]] = set()  # layouts that differ

    def peer_of(self, receiver: WorkerGroup, stream_name: str) -> worker_pb2.PeerKv | None:
        """The address at which a group's worker pulls from that of a stream; None: it cannot."""
        source = self._find(stream_name)
        return None if source is None else self._peer(receiver, source)

    def _find(self, stream_name: str) -> WorkerGroup | None:
        return next((one for one in self._groups if one.stream_name == stream_name), None)

    def _peer(self, receiver: WorkerGroup, source: WorkerGroup) -> worker_pb2.PeerKv | None:
        ours, theirs = receiver.kv, source.kv
        if not (source.is_attached and receiver.is_attached) or ours is None or theirs is None:
            return None
        name = next((name for name in theirs.handles if name in ours.handles), None)
        if name is None:
            return None
        if ours.layout_hash != theirs.layout_hash:
            self._tell(receiver, source)
            return None
        return worker_pb2.PeerKv(
            address=source.address,
            incarnation=theirs.incarnation,
            transport=name,
            handle=theirs.handles[name],
            server_name=source.server_name,
        )

    def _tell(self, receiver: WorkerGroup, source: WorkerGroup) -> None:
        assert receiver.kv is not None and source.kv is not None
        ours, theirs = receiver.kv.layout_hash, source.kv.layout_hash
        if (ours, theirs) not in self._told:
            self._told |= {(ours, theirs), (theirs, ours)}
            logger.warning(
                "no KV moves between workers %s and %s: their blocks have layouts %s and %s",
                receiver.address,
                source.address,
                ours.hex()[:16],
                theirs.hex()[:16],
            )

    # --- called by the groups --------------------------------------------------------------------

    def settle(self, group: WorkerGroup) -> None:
        """Goes on with what moves from a group and to it, between two of its steps."""
        core = group.core
        if core is None:
            return
        if core.peer_moves.num_lent:
            self._hand_over(group, core)
        self._give_back(core)
        if group.why_drained and core.num_running:
            self._begin(group, core)

    def lost(self, group: WorkerGroup) -> None:
        """A group's stream has ended: what is pulled from it is void, and it pulls no more."""
        for other in self._groups:
            if other.core is not None and other is not group:
                other.core.now_s = time.monotonic()
                other.core.peer_moves.source_lost(group.stream_name)
                other.wake()
        if group.core is not None:
            self._give_back(group.core)

    def _give_back(self, core: Scheduler) -> None:
        for lent in core.peer_moves.take_ended_loans():
            source = self._find(lent.source)
            if source is not None and source.core is not None:
                source.core.peer_moves.give_back(lent.loan_id)
                source.wake()

    # --- what leaves -----------------------------------------------------------------------------

    def _begin(self, group: WorkerGroup, core: Scheduler) -> None:
        """Takes requests from their slots for which another group has room."""
        places = [
            Place(other, other.core)
            for other in self._groups
            if other.core is not None and other.is_open and self._peer(other, group) is not None
        ]
        for sequence in core.live() if places else ():
            if sequence.status is Status.RUNNING:
                self._try_to_begin(group, core, sequence, places)

    def _try_to_begin(
        self, group: WorkerGroup, core: Scheduler, sequence: Sequence, places: list[Place]
    ) -> None:
        num_tokens = core.view.num_tokens(sequence)
        num_blocks = -(-(num_tokens + 1) // core.config.block_size)
        fitting = [one for one in places if self._has_room(one, sequence, num_blocks)]
        request_id = sequence.request.request_id
        if fitting and core.peer_moves.begin_move(request_id):
            target = ranked(fitting, sequence)[0].group
            self._promises[request_id] = _Promise(group.stream_name, target, num_blocks)

    def _has_room(self, place: Place, sequence: Sequence, num_blocks: int) -> bool:
        promised = [one for one in self._promises.values() if one.target is place.group]
        num_blocks += sum(one.num_blocks for one in promised)
        has_room = place.core.peer_moves.has_room(1 + len(promised), num_blocks)
        return has_room and place.core.migration.can_hold(sequence)

    def _hand_over(self, group: WorkerGroup, core: Scheduler) -> None:
        """Gives what has left to the groups that have room for it."""
        moved = core.migration.migrate_moved(group.stream_name)
        for one in moved:
            self._place(group, core, one)
        if moved:
            logger.info(
                "%d running requests move with their KV from worker %s", len(moved), group.address
            )
            still_leaving = {sequence.request.request_id for sequence in core.live()}
            self._promises = {
                request_id: promise
                for request_id, promise in self._promises.items()
                if promise.source != group.stream_name or request_id in still_leaving
            }

    def _place(self, group: WorkerGroup, core: Scheduler, moved: MovedSequence) -> None:
        promise = self._promises.pop(moved.sequence.request.request_id, None)
        target = None if promise is None else promise.target
        now_s = time.monotonic()
        if target is not None and target.core is not None and target.is_open:
            target.core.now_s = now_s
            if target.core.migration.can_hold(moved.sequence):
                target.core.migration.migrate_in(moved.sequence, moved.lent)
                target.wake()
                return
        core.peer_moves.give_back(moved.lent.loan_id)
        core.migration.migrate_in(moved.sequence)
