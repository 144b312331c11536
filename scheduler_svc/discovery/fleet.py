"""The worker groups of a scheduler: follows names, leases and operators."""

import asyncio
import logging
import time

from scheduler_svc.discovery.leases import TICK_S, Leases
from scheduler_svc.discovery.members import Members
from scheduler_svc.discovery.names import NameWatch, Resolve, resolve
from scheduler_svc.engine import Engine

REGISTERED = "registered"

logger = logging.getLogger(__name__)


class Fleet:
    """All sources of worker addresses. Belongs to the engine's event loop."""

    def __init__(self, engine: Engine, resolve: Resolve = resolve) -> None:
        config = engine.config
        self.members = Members(engine)
        self.accepts_registrations = config.accept_registrations
        self._engine = engine
        self._leases = Leases(config.registration_lease_s)
        self._names = [
            NameWatch(name, self.members, config.worker_dns_period_s, resolve)
            for name in config.worker_dns
        ]

    def register(self, address: str, incarnation: int) -> float:
        """Begins or renews a worker's lease; returns its seconds. Raises TooManyWorkers."""
        if address not in self.members.named_by(REGISTERED):
            self.members.join(address, REGISTERED)
            logger.info("worker %s has registered", address)
        self._leases.renew(address, incarnation)
        return self._leases.lease_s

    def deregister(self, address: str, incarnation: int) -> None:
        """Drains the group of a worker that will end."""
        if self._leases.end(address, incarnation):
            self.members.leave(address, REGISTERED, "it has deregistered")

    async def run(self) -> None:
        """Follows all sources until cancelled."""
        await asyncio.gather(self._end_leases(), *(name.run() for name in self._names))

    async def _end_leases(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            elapsed_s, before_s = time.monotonic() - before_s, time.monotonic()
            attached = {group.address for group in self._engine.groups if group.is_attached}
            for address in self._leases.tick(elapsed_s, attached.__contains__):
                self.members.leave(address, REGISTERED, "it has not renewed its registration")
