"""Looks at the workers while this scheduler stands by, and tells them that it lives afterwards."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from scheduler_svc.engine import Engine
from scheduler_svc.group import WorkerGroup
from scheduler_svc.standby.election import (
    HELD_PERIOD_S,
    LOT_BITS,
    TICK_S,
    Election,
    Sighting,
)
from scheduler_svc.worker.link import LinkLost

LOOKUPS = 2.0  # of names, in which every scheduler has found a new worker

logger = logging.getLogger(__name__)


class Standby:
    """Stands by until no other scheduler has the workers. Belongs to the engine's event loop."""

    def __init__(self, engine: Engine, delay_s: float) -> None:
        config, lot = engine.config, secrets.randbits(LOT_BITS)
        lookup_s = LOOKUPS * config.worker_dns_period_s if config.worker_dns else 0.0
        self._engine = engine
        self._election = Election(delay_s, config.heartbeat_timeout_s, lot, lookup_s)
        self._seen: dict[str, Sighting | None] = {}

    async def wait_for_turn(self) -> None:
        """Returns when the workers are this scheduler's to take, under a term of its own."""
        engine, why, before_s = self._engine, "", time.monotonic()
        async with _Asking(self._look) as asking:
            while True:
                await self._forget_dismissed()
                asking.each(engine.groups)
                await asyncio.sleep(TICK_S)
                now_s = time.monotonic()
                known = {group.address: self._seen.get(group.address) for group in engine.groups}
                term = self._election.tick(known, now_s - before_s)
                before_s = now_s
                if term is not None:
                    break
                if self._election.why_waits != why:
                    why = self._election.why_waits
                    logger.info("this scheduler stands by: %s", why)
                    engine.stand_by(why, is_warm=self._election.is_warm)
        logger.info("this scheduler takes the workers, from epoch %d on", term)
        engine.take_over(term)

    async def say_alive(self) -> None:
        """Tells every worker again and again that its scheduler lives, until cancelled.

        One that is drained and kept hears it, too: no standby is to take it for that.
        """
        told: list[WorkerGroup] = []
        async with _Asking(self._tell) as asking:
            while True:
                for group in told:
                    if group not in self._engine.groups:
                        await group.worker.close()
                told = list(self._engine.groups)
                asking.each(told)
                await asyncio.sleep(HELD_PERIOD_S)

    async def _look(self, group: WorkerGroup) -> None:
        self._seen[group.address] = None if group.is_dismissed else await _sight(group)

    async def _tell(self, group: WorkerGroup) -> None:
        with contextlib.suppress(LinkLost):
            group.worker.open()
            await group.worker.describe(max(group.epoch, self._engine.term))

    async def _forget_dismissed(self) -> None:
        for group in self._engine.remove_empty_groups():
            self._seen.pop(group.address, None)
            await group.worker.close()


async def _sight(group: WorkerGroup) -> Sighting | None:
    try:
        answer = await group.worker.describe()
    except LinkLost:
        return None
    return Sighting(
        answer.description.incarnation,
        answer.epoch,
        answer.is_attached if answer.HasField("is_attached") else None,
        answer.unheard_ms / 1e3 if answer.HasField("unheard_ms") else None,
    )


class _Asking:
    """One question at a time to each worker: one that hangs delays no other."""

    def __init__(self, ask: Callable[[WorkerGroup], Awaitable[None]]) -> None:
        self._ask = ask
        self._under_way: dict[str, asyncio.Future[None]] = {}

    async def __aenter__(self) -> "_Asking":
        return self

    async def __aexit__(self, *_: object) -> None:
        for asked in self._under_way.values():
            asked.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def each(self, groups: list[WorkerGroup]) -> None:
        """Asks all that are not being asked. Raises what was raised for one of them."""
        for address, asked in list(self._under_way.items()):
            if asked.done():
                del self._under_way[address]
                if not asked.cancelled():  # as a call is whose channel is closed meanwhile
                    asked.result()
        for group in groups:
            if group.address not in self._under_way:
                self._under_way[group.address] = asyncio.ensure_future(self._ask(group))
