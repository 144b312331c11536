"""Connects clients with worker groups.

All other tasks on the event loop access the cores through the engine's methods, which never await
between reading and changing them.
"""

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from pagewire.v1 import types_pb2
from scheduler_svc.adapters import AdapterRegistry
from scheduler_svc.clients.outbox import Outbox
from scheduler_svc.clients.registry import Clients
from scheduler_svc.config import ServiceConfig
from scheduler_svc.containment import message_of
from scheduler_svc.core import Finished, RefusalKind, Refused, Request, Sequence
from scheduler_svc.group import WorkerGroup
from scheduler_svc.metrics.counts import SchedulerCounts
from scheduler_svc.metrics.totals import Totals
from scheduler_svc.moves import Moves
from scheduler_svc.observe.request_spans import RequestSpans
from scheduler_svc.places import Place, best_first, move_all, move_waiting, tiers
from scheduler_svc.worker.link import OpenChannel, open_channel
from scheduler_svc.worker.served import Served
from wire.adapters import AdapterSource

_DEADLINE_CHECK_S = 0.02  # interval of deadline checks while no step makes them


class NotReady(Exception):
    """Raised when no worker has attached yet, so that model and limits are unknown."""


class Failed(Exception):
    """Raised when an exception of ours ended a request that was being submitted."""


class QueueFull(Exception):
    """Raised when the queue is full; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; try again in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class Engine:
    """Accepts requests, places each on a worker group, and migrates it when that group is lost."""

    def __init__(
        self,
        config: ServiceConfig,
        open_channel: OpenChannel = open_channel,
        counts: SchedulerCounts | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        self.config = config
        self.readiness_changed = asyncio.Event()
        self.num_overloaded = 0
        self.why_stands_by = "no worker was asked yet"
        self.is_warm = False  # it stands by, for a scheduler that has the workers
        self.counts = counts or SchedulerCounts(config.metrics_tenants)
        self.spans = spans or RequestSpans()
        self.retired = Totals()  # of groups that are gone
        self._clients = Clients(self.counts, self.spans)
        self._served = Served()
        self.adapters = AdapterRegistry()
        self._open_channel = open_channel
        self._running: dict[asyncio.Task[None], WorkerGroup] = {}
        self._groups_changed = asyncio.Event()
        self.groups: list[WorkerGroup] = []
        self._moves = Moves(self.groups)
        for address in config.workers:
            self.add_group(address)
        self._started_s = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since this engine was created."""
        return time.monotonic() - self._started_s

    @property
    def is_ready(self) -> bool:
        """True if a worker is attached that takes requests."""
        return any(group.is_open for group in self.groups)

    @property
    def reason(self) -> str:
        """Why no worker is attached."""
        if self.is_ready:
            return ""
        if self.stands_by:
            return f"stands by: {self.why_stands_by}"
        if not self.groups:
            return "no worker is known yet"
        if len(self.groups) == 1:
            return self.groups[0].why_not_open
        return "; ".join(f"{group.address}: {group.why_not_open}" for group in self.groups)

    @property
    def term(self) -> int:
        """The first epoch of this scheduler's term; 0: it has none."""
        return self._served.term

    @property
    def stands_by(self) -> bool:
        """True if it waits until no other scheduler has the workers."""
        return self.config.standby_delay_s is not None and not self.term

    def stand_by(self, why: str, *, is_warm: bool) -> None:
        """Says why it waits; it is warm if another scheduler has the workers."""
        self.why_stands_by = why
        if is_warm != self.is_warm:
            self.is_warm = is_warm
            self.readiness_changed.set()

    def take_over(self, term: int) -> None:
        """Ends the standby: `run` attaches to the workers, under epochs from `term` on."""
        self._served.term, self.is_warm = term, False
        self.readiness_changed.set()

    @property
    def model(self) -> types_pb2.ModelInfo | None:
        """The served model; None before the first worker attached."""
        return self._served.model

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number. Raises NotReady before the first worker attached."""
        return self._places()[0].core.config.vocab_size

    def find(self, request_id: str) -> tuple[WorkerGroup, Sequence] | None:
        """The group and the sequence of a live request; None when there is none."""
        for group in self.groups:
            sequence = group.core.find(request_id) if group.core else None
            if sequence is not None:
                return group, sequence
        return None

    def _places(self) -> list[Place]:
        places = [Place(group, group.core) for group in self.groups if group.core is not None]
        if not places:
            raise NotReady(self.reason)
        return places

    # --- clients ---------------------------------------------------------------------------------

    def open_client(self) -> tuple[int, Outbox]:
        """The number and the outbox of a new stream that will submit requests."""
        return self._clients.open()

    def close_client(self, client: int, request_ids: Iterable[str]) -> None:
        """Removes a client and aborts its live requests."""
        self._clients.close(client)
        for request_id in request_ids:
            self.abort(request_id)

    def submit(self, request: Request) -> None:
        """Queues a request at the best group.

        Raises core.Refused, Overloaded, or NotReady before the first worker attached.
        """
        places, refusals = self._places(), list[tuple[Place, Refused]]()
        holder = self.find(request.request_id)
        if holder is not None:  # this group refuses the duplicate id
            places = [place for place in places if place.group is holder[0]]
        for tier in tiers(places):
            for place in best_first(tier, request):
                try:
                    place.core.add(request)
                except Refused as refused:
                    if refused.kind not in (RefusalKind.OVERLOADED, RefusalKind.NEVER_FITS):
                        raise
                    refusals.append((place, refused))
                except Exception as error:
                    place.group.contain(error, request.request_id)
                    raise Failed(message_of(error)) from error
                else:
                    place.group.wake()
                    return
            if any(refused.kind is RefusalKind.OVERLOADED for _, refused in refusals):
                break  # this group will have room sooner than a lost worker's
        raise self._refusal(request, refusals)

    def _refusal(self, request: Request, refusals: list[tuple[Place, Refused]]) -> Exception:
        """The exception for a refused request; under overload, makes a reservation."""
        now_s = request.arrival_s
        full = [(p, r) for p, r in refusals if r.kind is RefusalKind.OVERLOADED]
        if not full:
            return refusals[-1][1]
        delays_s = [p.group.pace.retry_after_s(p.core, request, now_s) for p, _ in full]
        retry_after_s = min(delays_s)
        place, refused = full[delays_s.index(retry_after_s)]
        place.core.reserve(request, now_s + retry_after_s)
        self.num_overloaded += 1
        return QueueFull(str(refused), retry_after_s)

    def abort(self, request_id: str) -> bool:
        """Ends a live request without notifying its client; False when there is none."""
        finished = self._abort(request_id)
        if finished is not None:
            self._clients.note_end(finished)
        return finished is not None

    def abort_and_tell(self, request_id: str) -> bool:
        """Ends a live request at another caller's wish, and notifies its client."""
        finished = self._abort(request_id)
        if finished is not None:
            self._clients.tell_ends([finished])
        return finished is not None

    def _abort(self, request_id: str) -> Finished | None:
        for group in self.groups:
            if group.core is not None and group.core.find(request_id) is not None:
                group.core.now_s = time.monotonic()  # the time of the end, for later questions
                try:
                    return group.core.abort(request_id)
                except Exception as error:
                    group.contain(error, request_id)
                finally:
                    group.wake()
        return None

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Changes the priority of a live request; False when there is none."""
        return any(
            group.core is not None and group.core.set_priority(request_id, priority) is not None
            for group in self.groups
        )

    def end_session(self, session_id: str, cache_salt: str) -> None:
        """Has each group keep nothing more for a session that its client has ended."""
        for group in self.groups:
            if group.core is not None:
                group.core.end_session(session_id, cache_salt)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix caches; returns the number of blocks forgotten."""
        num_blocks = sum(group.core.reset_prefix_cache() for group in self.groups if group.core)
        for group in self.groups:
            group.tell_cache_changes()
        return num_blocks

    # --- adapters --------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, replaces: bool) -> AdapterSource:
        """Has all attached workers read an adapter. Raises AdapterRefused."""
        workers = [group.worker.load_adapter for group in self.groups if group.is_attached]
        return await self.adapters.load(name, path, workers, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        """Takes an adapter's name away; live requests go on. Raises AdapterRefused."""
        workers = [group.worker.unload_adapter for group in self.groups if group.is_attached]
        await self.adapters.unload(name, workers)

    # --- groups ----------------------------------------------------------------------------------

    def add_group(
        self, address: str, source: str = "--worker", server_name: str = ""
    ) -> WorkerGroup:
        """Adds the worker group at an address, or ends the drain of the one that is there.

        Over TLS its certificate must be for `server_name`, if given.
        """
        group = next((group for group in self.groups if group.address == address), None)
        if group is None:
            named = partial(self._open_channel, server_name=server_name)
            group = WorkerGroup(
                self.config,
                address,
                self._clients,
                self._served,
                self._on_readiness,
                named if server_name else self._open_channel,
                lambda: self.is_ready,
                self.adapters,
                self._moves,
            )
            group.server_name = server_name
            taken = {other.rank for other in self.groups}
            group.rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
            self.groups.append(group)
        group.source = source
        group.is_kept = False
        group.recall()
        self._groups_changed.set()
        return group

    def drain_group(self, address: str, why: str, *, is_kept: bool = False) -> bool:
        """Gives a group no new requests and lets its worker go when it is empty.

        The group goes, too, unless it is to be kept. False when there is none at this address.
        """
        group = next((group for group in self.groups if group.address == address), None)
        if group is None:
            return False
        group.is_kept = is_kept
        group.drain(why, is_final=True)
        for task, running in self._running.items():
            if running is group and not group.is_attached:
                task.cancel()
        self._groups_changed.set()
        return True

    def remove_empty_groups(self) -> list[WorkerGroup]:
        """Removes the dismissed groups that hold nothing, and returns them.

        The last one that has had a worker stays until another has one: requests wait in it.
        """
        running, removed = list(self._running.values()), []
        for group in [g for g in self.groups if g.is_dismissed and not g.is_kept]:
            others = [other.core for other in self.groups if other is not group and other.core]
            if group in running or (group.core and (any(group.core.live()) or not others)):
                continue
            self.groups.remove(group)
            removed.append(group)
            group.close()
            if group.core is not None:
                self.retired.add(group.core)
        return removed

    def _on_readiness(self) -> None:
        """Migrates requests from groups that cannot compute them to groups that can."""
        self.readiness_changed.set()
        self._groups_changed.set()
        if not self.is_ready:
            return
        places, now_s = self._places(), time.monotonic()
        targets = [place for place in places if place.group.is_open]
        for place in places:
            if place.group.is_open or not place.core.num_waiting:
                continue
            if place.group.verdict.is_open:
                continue  # soon: what its requests are to blame for goes with them
            if place.core.view.is_worker_away:
                move_all(place, targets, now_s)
            elif place.group.why_drained:
                move_waiting(place, targets, now_s)

    async def run(self) -> None:
        """Serves until cancelled. Raises FencedOut."""
        expiring = asyncio.create_task(self._expire_while_away())
        try:
            while True:
                self._groups_changed.clear()
                self._start_groups()
                self.remove_empty_groups()
                changing = asyncio.create_task(self._groups_changed.wait())
                waited = {expiring, changing, *self._running}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
                for task in [task for task in (expiring, *self._running) if task in done]:
                    self._running.pop(task, None)
                    if not task.cancelled():
                        task.result()
        finally:
            tasks = [expiring, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for group in self.groups:
                group.close()

    def _start_groups(self) -> None:
        """Runs each group that should run and does not."""
        running = list(self._running.values())
        for group in self.groups:
            if group not in running and not group.is_dismissed:
                self._running[asyncio.create_task(group.run())] = group

    async def _expire_while_away(self) -> None:
        """Enforces deadlines while no step is planned: during a long step, or without a worker."""
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            for group in self.groups:
                if group.core is not None and group.core.next_deadline_s is not None:
                    group.expire()
                    core = group.core
                    if core.transfers.num_in_flight or core.peer_moves.num_in_flight:
                        group.wake()  # what waited for a copy that is late computes instead
