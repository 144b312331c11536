"""LiveService: a snapshot of all groups at a fixed interval, computed while there are watchers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pagewire.v1 import live_pb2, live_pb2_grpc
from scheduler_svc.engine import Engine
from scheduler_svc.live.activity import GroupWatch
from scheduler_svc.status import status_of

INTERVAL_S = 0.1
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0
DEFAULT_CELLS, MAX_CELLS = 1024, 4096
DEFAULT_REQUESTS, MAX_REQUESTS = 512, 2048
MAX_SESSIONS, SESSIONS_EVERY_S = 256, 1.0
MAX_WATCHERS = 16  # a gateway has one, however many watch its page

Context = grpc.aio.ServicerContext[live_pb2.WatchRequest, live_pb2.WatchResponse]


class BadWatch(ValueError):
    """Raised for a Watch with a number out of bounds; names the field."""


class LiveService(live_pb2_grpc.LiveServiceServicer):
    """Reads the engine; changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_watchers = 0

    async def Watch(
        self, request: live_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[live_pb2.WatchResponse]:
        """Snapshots until the caller leaves. Aborts with a status for a bad field."""
        try:
            watcher, interval_s = Watcher(self._engine, request), interval_of(request)
        except BadWatch as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._num_watchers >= MAX_WATCHERS:
            problem = f"{MAX_WATCHERS} watch this scheduler already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        self._num_watchers += 1
        try:
            while True:
                yield watcher.look()
                await asyncio.sleep(interval_s)
        finally:
            self._num_watchers -= 1


def interval_of(request: live_pb2.WatchRequest) -> float:
    """Seconds between two messages. Raises BadWatch."""
    interval_s = request.interval_s or INTERVAL_S
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:  # false for NaN, too
        bounds = f"[{MIN_INTERVAL_S:g}, {MAX_INTERVAL_S:g}]"
        raise BadWatch(f"interval_s: {interval_s:g} is outside {bounds}")
    return interval_s


class Watcher:
    """One caller's view of all groups."""

    def __init__(self, engine: Engine, request: live_pb2.WatchRequest) -> None:
        self._engine = engine
        self._watches: dict[str, GroupWatch] = {}
        self._max_cells = _at_most("max_cells", request.max_cells or DEFAULT_CELLS, MAX_CELLS)
        wanted = request.max_requests or DEFAULT_REQUESTS
        self._max_requests = _at_most("max_requests", wanted, MAX_REQUESTS)
        self._most_sessions = _at_most("most_sessions", request.most_sessions, MAX_SESSIONS)
        self._sessions_due_s = 0.0

    def look(self) -> live_pb2.WatchResponse:
        """The present state."""
        activities = []
        for group in self._engine.groups:
            if group.core is None:
                continue
            watch = self._watches.get(group.address)
            if watch is None or watch.group is not group:
                watch = GroupWatch(group, self._max_cells, self._max_requests)
                self._watches[group.address] = watch
            activities.append(watch.look(group.core))
        tells = self._most_sessions > 0 and self._engine.uptime_s >= self._sessions_due_s
        most_sessions = self._most_sessions if tells else 0
        status = status_of(self._engine, foresees=False, most_sessions=most_sessions)
        if tells:
            self._sessions_due_s = status.uptime_s + SESSIONS_EVERY_S
        return live_pb2.WatchResponse(status=status, groups=activities, tells_sessions=tells)


def _at_most(field: str, value: int, most: int) -> int:
    if value > most:
        raise BadWatch(f"{field}: {value} is more than {most}")
    return value
