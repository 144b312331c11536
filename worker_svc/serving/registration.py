"""Announces this worker to a scheduler, renews its lease, and takes leave before the end.

One thread with an event loop of its own; a scheduler that cannot be reached is asked again, so
workers and scheduler start in any order.
"""

import asyncio
import logging
import threading

import grpc

from pagewire.v1 import fleet_pb2, fleet_pb2_grpc
from wire.identity.options import IdentityOptions
from wire.identity.peers import peer_opener
from wire.server import CHANNEL_OPTIONS

RENEWALS_PER_LEASE = 5  # of which all but one may be lost
RETRY_S = 1.0
CALL_S = 5.0
LEAVE_S = 2.0  # the step stream says so, too

log = logging.getLogger(__name__)


class Registration:
    """A lease at one scheduler."""

    def __init__(self, scheduler: str, advertised: str, identity: IdentityOptions) -> None:
        self._scheduler = scheduler
        self._advertised = advertised
        self._open = peer_opener(identity)
        self._incarnation = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Event | None = None
        self._is_over = False
        self._problem = ""

    def begin(self, incarnation: int) -> None:
        """Announces the worker from now on; no effect after `leave`."""
        with self._lock:
            if self._is_over or self._thread is not None:
                return
            self._incarnation = incarnation
            self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Tells the scheduler that the worker will end; waits a short time for its answer."""
        with self._lock:
            self._is_over, thread = True, self._thread
            if self._loop is not None and self._leaving is not None:
                self._loop.call_soon_threadsafe(self._leaving.set)
        if thread is not None:
            thread.join(LEAVE_S)

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        leaving = asyncio.Event()
        with self._lock:
            self._loop, self._leaving = asyncio.get_running_loop(), leaving
            if self._is_over:
                return
        options = [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1_000)]
        channel = self._open(self._scheduler, options)
        try:
            stub: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
            while not leaving.is_set():
                await self._pause(leaving, await self._renew(stub))
            await self._take_leave(stub)
        finally:
            with self._lock:
                self._loop = None
            await channel.close()

    @staticmethod
    async def _pause(leaving: asyncio.Event, duration_s: float) -> None:
        try:
            async with asyncio.timeout(duration_s):
                await leaving.wait()
        except TimeoutError:
            pass

    async def _renew(self, stub: "fleet_pb2_grpc.FleetServiceAsyncStub") -> float:
        """Registers; returns the seconds until the next time."""
        request = fleet_pb2.RegisterRequest(address=self._advertised, incarnation=self._incarnation)
        try:
            answer = await stub.Register(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            self._tell(f"{error.code().name}: {error.details()}")
            return RETRY_S
        self._tell("")
        return float(answer.lease_s) / RENEWALS_PER_LEASE

    async def _take_leave(self, stub: "fleet_pb2_grpc.FleetServiceAsyncStub") -> None:
        request = fleet_pb2.DeregisterRequest(
            address=self._advertised, incarnation=self._incarnation
        )
        try:
            await stub.Deregister(request, timeout=LEAVE_S)
        except grpc.aio.AioRpcError as error:
            log.info("not deregistered at %s: %s", self._scheduler, error.code().name)

    def _tell(self, problem: str) -> None:
        """Logs a problem once, and success after one."""
        if problem and problem != self._problem:
            log.warning("not registered at the scheduler %s: %s", self._scheduler, problem)
        elif not problem and self._problem != "none":
            log.info("registered at the scheduler %s as %s", self._scheduler, self._advertised)
        self._problem = problem or "none"
