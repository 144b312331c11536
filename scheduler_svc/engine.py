"""Connects clients with worker groups.

All other tasks on the event loop access the cores through the engine's methods, which never await
between reading and changing them.
"""

import asyncio
import time
from collections.abc import Iterable

from pagewire.v1 import types_pb2
from scheduler_svc.clients.outbox import Outbox
from scheduler_svc.clients.registry import Clients
from scheduler_svc.config import ServiceConfig
from scheduler_svc.containment import message_of
from scheduler_svc.core import Finished, RefusalKind, Refused, Request, Sequence
from scheduler_svc.group import Served, WorkerGroup
from scheduler_svc.metrics.counts import SchedulerCounts
from scheduler_svc.places import Place, best_first, move_all
from scheduler_svc.worker.link import OpenChannel, open_channel

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
    ) -> None:
        self.config = config
        self.readiness_changed = asyncio.Event()
        self.num_overloaded = 0
        self.counts = counts or SchedulerCounts(config.metrics_tenants)
        self._clients = Clients(self.counts)
        self._served = Served()
        self.groups = [
            WorkerGroup(
                config, address, self._clients, self._served, self._on_readiness, open_channel
            )
            for address in config.workers
        ]
        self._started_s = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since this engine was created."""
        return time.monotonic() - self._started_s

    @property
    def is_ready(self) -> bool:
        """Whether a worker is attached."""
        return any(group.is_ready for group in self.groups)

    @property
    def reason(self) -> str:
        """Why no worker is attached."""
        if self.is_ready:
            return ""
        if len(self.groups) == 1:
            return self.groups[0].reason
        return "; ".join(f"{group.address}: {group.reason}" for group in self.groups)

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
        for are_ready in (True, False):
            tier = [place for place in places if place.group.is_ready is are_ready]
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
            self.counts.ended(finished)
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

    def reset_prefix_cache(self) -> int:
        """Empties the prefix caches; returns the number of blocks forgotten."""
        return sum(group.core.reset_prefix_cache() for group in self.groups if group.core)

    # --- groups ----------------------------------------------------------------------------------

    def _on_readiness(self) -> None:
        """Migrates requests from groups without a worker to groups that have one."""
        self.readiness_changed.set()
        if not self.is_ready:
            return
        places, now_s = self._places(), time.monotonic()
        ready = [place for place in places if place.group.is_ready]
        for place in places:
            if place.core.view.is_worker_away and place.core.num_waiting:
                move_all(place, ready, now_s)

    async def run(self) -> None:
        """Serves until cancelled. Raises FencedOut."""
        tasks = [asyncio.create_task(group.run()) for group in self.groups]
        tasks.append(asyncio.create_task(self._expire_while_away()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire_while_away(self) -> None:
        """Enforces deadlines while no step is planned: during a long step, or without a worker."""
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            for group in self.groups:
                if group.core is not None and group.core.next_deadline_s is not None:
                    group.expire()
