"""Loads and unloads adapters at the scheduler, which tells all gateways."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc

from gateway.errors.request_errors import from_grpc_code
from gateway.scheduler.readiness import ReadinessWatch
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc

LOAD_TIMEOUT_S = 330.0  # longer than a scheduler waits for its workers
T = TypeVar("T")


class AdapterAdmin:
    """The two calls; each returns once this gateway knows of the change, too."""

    def __init__(self, channel: grpc.aio.Channel, readiness: ReadinessWatch) -> None:
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = (
            scheduler_pb2_grpc.SchedulerServiceStub(channel)
        )
        self._readiness = readiness

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Has the workers read an adapter. Raises RequestError."""
        request = scheduler_pb2.SchedulerServiceLoadAdapterRequest(
            name=name, path=path, replaces=replaces
        )
        answer = await _answered(self._stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S))
        loaded = answer.adapter.adapter_id
        await self._readiness.wait_until(
            lambda: any(one.adapter_id == loaded for one in self._readiness.current.adapters)
        )

    async def unload(self, name: str) -> None:
        """Takes the name of an adapter away. Raises RequestError."""
        request = scheduler_pb2.SchedulerServiceUnloadAdapterRequest(name=name)
        await _answered(self._stub.UnloadAdapter(request, timeout=LOAD_TIMEOUT_S))
        await self._readiness.wait_until(
            lambda: all(one.name != name for one in self._readiness.current.adapters)
        )


async def _answered(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        problem = error.details() or error.code().name
        raise from_grpc_code(error.code().value[0], problem) from error
