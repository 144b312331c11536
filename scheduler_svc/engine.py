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
from scheduler_svc.core import RefusalKind, Refused, Request
from scheduler_svc.group import WorkerGroup
from scheduler_svc.outbox import Outbox
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
    """Takes requests in, hands them to a worker group, and finds them again."""

    def __init__(self, config: ServiceConfig, open_channel: OpenChannel = open_channel) -> None:
        self.config = config
        self.readiness_changed = asyncio.Event()
        self._clients = Clients()
        self.group = WorkerGroup(
            config, config.worker, self._clients, self.readiness_changed.set, open_channel
        )
        self._started_s = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since this engine was made."""
        return time.monotonic() - self._started_s

    @property
    def is_ready(self) -> bool:
        """Whether a worker is attached."""
        return self.group.is_ready

    @property
    def reason(self) -> str:
        """Why not."""
        return self.group.reason

    @property
    def model(self) -> types_pb2.ModelInfo | None:
        """What is served; None before the first worker attached."""
        return self.group.model

    # --- clients ---------------------------------------------------------------------------------

    def open_client(self) -> tuple[int, Outbox]:
        """A number and an outbox for a stream that will submit requests."""
        return self._clients.open()

    def close_client(self, client: int, request_ids: Iterable[str]) -> None:
        """Forgets a stream and aborts what it left live."""
        self._clients.close(client)
        for request_id in request_ids:
            self.abort(request_id)
        self.group.wake()

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises core.Refused, Overloaded, or NotReady before the first worker attached.
        """
        group, core = self.group, self.group.core
        if core is None:
            raise NotReady(self.reason)
        try:
            core.add(request)
        except Refused as refused:
            if refused.kind is not RefusalKind.OVERLOADED:
                raise
            retry_after_s = group.pace.retry_after_s(core, request, request.arrival_s)
            raise Overloaded(str(refused), retry_after_s) from refused
        group.wake()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises NotReady before the first worker attached."""
        if self.group.core is None:
            raise NotReady(self.reason)
        return self.group.core.config.vocab_size

    def abort(self, request_id: str) -> bool:
        """Ends a live request without telling its client; False when there is none."""
        core = self.group.core
        return core is not None and core.abort(request_id) is not None

    def abort_and_tell(self, request_id: str) -> bool:
        """Ends a live request for somebody else than its client, who is told."""
        core = self.group.core
        finished = core.abort(request_id) if core else None
        if finished is None:
            return False
        self._clients.tell_ends([finished])
        return True

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Makes a live request more or less urgent; False when there is none."""
        core = self.group.core
        return core is not None and core.set_priority(request_id, priority) is not None

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks had one."""
        return self.group.core.reset_prefix_cache() if self.group.core else 0

    # --- running ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled or FencedOut."""
        expiring = asyncio.create_task(self._expire_while_away())
        try:
            await self.group.run()
        finally:
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)

    async def _expire_while_away(self) -> None:
        """Deadlines hold while no step is planned, too: during a long one, or without a worker."""
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            core = self.group.core
            if core is not None and core.next_deadline_s is not None:
                self.group.expire()
