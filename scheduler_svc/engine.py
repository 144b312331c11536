"""The scheduler's clients on one side, its worker groups on the other.

Everybody else on the event loop talks to the cores through the engine's methods, which never await
between reading and changing them.
"""

import asyncio
import time
from collections.abc import Iterable

from pagewire.v1 import types_pb2
from scheduler_svc.clients import Clients
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import Finished, RefusalKind, Refused, Request, Sequence
from scheduler_svc.group import Served, WorkerGroup
from scheduler_svc.outbox import Outbox
from scheduler_svc.places import Place, best_first, move_all
from scheduler_svc.worker_link import OpenChannel, open_channel

_DEADLINE_CHECK_S = 0.02  # between looks at the deadlines while no step does it


class NotReady(Exception):
    """No worker has attached yet, so nothing is known about what could be served."""


class Overloaded(Exception):
    """Too much waits already; there will be room later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; try again in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class Engine:
    """Takes requests in, places each on a worker group, and moves it on when that is lost."""

    def __init__(self, config: ServiceConfig, open_channel: OpenChannel = open_channel) -> None:
        self.config = config
        self.readiness_changed = asyncio.Event()
        self.num_overloaded = 0
        self._clients = Clients()
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
        """Seconds since this engine was made."""
        return time.monotonic() - self._started_s

    @property
    def is_ready(self) -> bool:
        """Whether a worker is attached."""
        return any(group.is_ready for group in self.groups)

    @property
    def reason(self) -> str:
        """Why not."""
        if self.is_ready:
            return ""
        if len(self.groups) == 1:
            return self.groups[0].reason
        return "; ".join(f"{group.address}: {group.reason}" for group in self.groups)

    @property
    def model(self) -> types_pb2.ModelInfo | None:
        """What is served; None before the first worker attached."""
        return self._served.model

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises NotReady before the first worker attached."""
        return self._places()[0].core.config.vocab_size

    def find(self, request_id: str) -> tuple[WorkerGroup, Sequence] | None:
        """Where a live request is."""
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
        """A number and an outbox for a stream that will submit requests."""
        return self._clients.open()

    def close_client(self, client: int, request_ids: Iterable[str]) -> None:
        """Forgets a stream and aborts what it left live."""
        self._clients.close(client)
        for request_id in request_ids:
            self.abort(request_id)

    def submit(self, request: Request) -> None:
        """Queues a request where it is best placed.

        Raises core.Refused, Overloaded, or NotReady before the first worker attached.
        """
        places, refusals = self._places(), list[tuple[Place, Refused]]()
        holder = self.find(request.request_id)
        if holder is not None:  # it refuses the second by the same name
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
                else:
                    place.group.wake()
                    return
            if any(refused.kind is RefusalKind.OVERLOADED for _, refused in refusals):
                break  # there will be room; a worker that is away would take longer
        raise self._refusal(request, refusals)

    def _refusal(self, request: Request, refusals: list[tuple[Place, Refused]]) -> Exception:
        """Why no group takes a request; under overload, where a place is kept and for when."""
        now_s = request.arrival_s
        full = [(p, r) for p, r in refusals if r.kind is RefusalKind.OVERLOADED]
        if not full:
            return refusals[-1][1]
        delays_s = [p.group.pace.retry_after_s(p.core, request, now_s) for p, _ in full]
        retry_after_s = min(delays_s)
        place, refused = full[delays_s.index(retry_after_s)]
        place.core.promise(request, now_s + retry_after_s)
        self.num_overloaded += 1
        return Overloaded(str(refused), retry_after_s)

    def abort(self, request_id: str) -> bool:
        """Ends a live request without telling its client; False when there is none."""
        return self._abort(request_id) is not None

    def abort_and_tell(self, request_id: str) -> bool:
        """Ends a live request for somebody else than its client, who is told."""
        finished = self._abort(request_id)
        if finished is not None:
            self._clients.tell_ends([finished])
        return finished is not None

    def _abort(self, request_id: str) -> Finished | None:
        for group in self.groups:
            if group.core is not None and group.core.find(request_id) is not None:
                group.core.now_s = time.monotonic()  # when it ended, for those who ask
                finished = group.core.abort(request_id)
                group.wake()
                return finished
        return None

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Makes a live request more or less urgent; False when there is none."""
        return any(
            group.core is not None and group.core.set_priority(request_id, priority) is not None
            for group in self.groups
        )

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks had one."""
        return sum(group.core.reset_prefix_cache() for group in self.groups if group.core)

    # --- groups ----------------------------------------------------------------------------------

    def _on_readiness(self) -> None:
        """A worker has come or gone: whoever is without one moves to those that have one."""
        self.readiness_changed.set()
        if not self.is_ready:
            return
        places, now_s = self._places(), time.monotonic()
        ready = [place for place in places if place.group.is_ready]
        for place in places:
            if place.core.view.is_worker_away and place.core.num_waiting:
                move_all(place, ready, now_s)

    async def run(self) -> None:
        """Serves until cancelled or FencedOut."""
        tasks = [asyncio.create_task(group.run()) for group in self.groups]
        tasks.append(asyncio.create_task(self._expire_while_away()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire_while_away(self) -> None:
        """Deadlines hold while no step is planned, too: during a long one, or without a worker."""
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            for group in self.groups:
                if group.core is not None and group.core.next_deadline_s is not None:
                    group.expire()
