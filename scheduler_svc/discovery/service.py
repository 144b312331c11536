"""FleetService: registration of workers, and what operators change about worker groups."""

from typing import Any

import grpc

from pagewire.v1 import fleet_pb2, fleet_pb2_grpc
from scheduler_svc.config import check_address
from scheduler_svc.discovery.fleet import Fleet
from scheduler_svc.discovery.members import TooManyWorkers

Context = grpc.aio.ServicerContext[Any, Any]
NOT_ACCEPTED = "this scheduler was started without --accept-registrations"


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Passes calls on to the fleet; each error is a status."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: Context
    ) -> fleet_pb2.RegisterResponse:
        """Begins or renews a lease."""
        await self._check_registration(request.address, context)
        try:
            lease_s = self._fleet.register(request.address, request.incarnation)
        except TooManyWorkers as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return fleet_pb2.RegisterResponse(lease_s=lease_s)

    async def Deregister(
        self, request: fleet_pb2.DeregisterRequest, context: Context
    ) -> fleet_pb2.DeregisterResponse:
        """Ends a lease."""
        await self._check_registration(request.address, context)
        self._fleet.deregister(request.address, request.incarnation)
        return fleet_pb2.DeregisterResponse()

    async def AddWorker(
        self, request: fleet_pb2.AddWorkerRequest, context: Context
    ) -> fleet_pb2.AddWorkerResponse:
        """Adds a group, or ends its drain."""
        await _check(request.address, context)
        try:
            self._fleet.members.add(request.address)
        except TooManyWorkers as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return fleet_pb2.AddWorkerResponse()

    async def DrainWorker(
        self, request: fleet_pb2.DrainWorkerRequest, context: Context
    ) -> fleet_pb2.DrainWorkerResponse:
        """Drains a group and keeps it."""
        if not self._fleet.members.drain(request.address):
            await _not_found(request.address, context)
        return fleet_pb2.DrainWorkerResponse()

    async def RemoveWorker(
        self, request: fleet_pb2.RemoveWorkerRequest, context: Context
    ) -> fleet_pb2.RemoveWorkerResponse:
        """Drains a group and removes it."""
        if not self._fleet.members.remove(request.address):
            await _not_found(request.address, context)
        return fleet_pb2.RemoveWorkerResponse()

    async def _check_registration(self, address: str, context: Context) -> None:
        if not self._fleet.accepts_registrations:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NOT_ACCEPTED)
        await _check(address, context)


async def _check(address: str, context: Context) -> None:
    try:
        check_address("address", address)
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


async def _not_found(address: str, context: Context) -> None:
    message = f"address: there is no worker group at {address!r}"
    await context.abort(grpc.StatusCode.NOT_FOUND, message)
