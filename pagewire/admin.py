"""Calls of an operator: what the scheduler does, and changes to requests that are live.

>>> from pagewire.admin import Admin
>>> with Admin("localhost:50052") as admin:  # doctest: +SKIP
...     print(admin.status().num_waiting)
...     admin.set_priority("nightly-7", -1)
...     admin.abort("nightly-8")

They go to the scheduler's port, not to a gateway's, and need a key with the role operator, or the
services' peer token. Of `pagewire up` on this machine the token is found without being given.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

import grpc.aio

from pagewire._channel import DEFAULT_SCHEDULER, AioOpener, Connection, open_channel
from pagewire._connection.environment import API_KEY, found_tls
from pagewire._connection.peer_token import key_for
from pagewire._errors import translated
from pagewire._messages.fields import set_fields
from pagewire._types import TLS
from pagewire.v1 import debug_pb2
from pagewire.v1 import scheduler_pb2 as pb
from pagewire.v1.debug_pb2_grpc import DebugServiceStub
from pagewire.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:  # names that only the typing stubs define
    from pagewire.v1.debug_pb2_grpc import DebugServiceAsyncStub
    from pagewire.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

__all__ = ["Admin", "AsyncAdmin", "LiveRequestSummary", "SchedulerStatus", "WorkerGroupSummary"]

TARGET = "PAGEWIRE_SCHEDULER"
DEFAULT_TIMEOUT_S = 10.0

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class WorkerGroupSummary:
    """One worker group, as the scheduler sees it."""

    address: str
    is_ready: bool
    reason: str  # why not, in words
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_losses: int  # times that its worker was lost


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counters and gauges of a scheduler. Counters count since its start."""

    is_ready: bool
    reason: str  # why not, in words
    model: str  # empty before a worker has attached
    policy: str  # fcfs, priority or fair
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int  # of the KV cache
    num_free_blocks: int
    block_size: int  # tokens
    num_accepted: int
    num_finished: int
    num_output_tokens: int
    num_preemptions: int
    num_overloaded: int
    num_expired: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    uptime_s: float
    seconds_of_backlog: float | None  # until all live requests would have ended
    groups: tuple[WorkerGroupSummary, ...]


@dataclass(frozen=True, slots=True)
class LiveRequestSummary:
    """A live request. A gateway's tenants and several outputs are part of its id."""

    request_id: str
    state: str  # waiting, running or preempted
    num_prompt_tokens: int
    num_output_tokens: int
    age_s: float


_STATUS_COUNTS = (
    *("reason", "policy", "num_running", "num_waiting", "num_waiting_tokens", "num_blocks"),
    *("num_free_blocks", "block_size", "num_accepted", "num_finished", "num_output_tokens"),
    *("num_preemptions", "num_overloaded", "num_expired", "prefix_query_tokens"),
    *("prefix_hit_tokens", "uptime_s"),
)
_GROUP_COUNTS = (
    *("address", "reason", "num_running", "num_waiting", "num_blocks", "num_free_blocks"),
    "num_losses",
)


def _to_status(told: pb.GetStatusResponse) -> SchedulerStatus:
    groups = tuple(
        WorkerGroupSummary(
            is_ready=one.ready, **{name: getattr(one, name) for name in _GROUP_COUNTS}
        )
        for one in told.groups
    )
    backlog_s = told.seconds_of_backlog if told.HasField("seconds_of_backlog") else None
    return SchedulerStatus(
        is_ready=told.ready,
        model=told.model.model,
        seconds_of_backlog=backlog_s,
        groups=groups,
        **{name: getattr(told, name) for name in _STATUS_COUNTS},
    )


def _to_summaries(told: debug_pb2.ListRequestsResponse) -> tuple[LiveRequestSummary, ...]:
    return tuple(
        LiveRequestSummary(
            one.request_id, one.state, one.num_prompt_tokens, one.num_output_tokens, one.age_s
        )
        for one in told.requests
    )


class _Operator:
    """The connection that both clients open."""

    def __init__(
        self,
        target: str | None = None,
        *,
        api_key: str | None = None,
        tls: TLS | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_insecure_key: bool = False,
    ) -> None:
        target = target or os.environ.get(TARGET) or DEFAULT_SCHEDULER
        tls = tls or found_tls()
        if api_key is None:
            is_private = tls is not None or allow_insecure_key
            api_key = key_for(target, os.environ.get(API_KEY) or None, is_private=is_private)
        self._connection = Connection(target, api_key, tls, timeout_s, allow_insecure_key)
        self._open()

    def _open(self) -> None:
        raise NotImplementedError


class Admin(_Operator):
    """A blocking connection to a scheduler; may be shared between threads."""

    def _open(self) -> None:
        self._channel = open_channel(self._connection)
        self._stub = SchedulerServiceStub(self._channel)
        self._debug = DebugServiceStub(self._channel)

    def status(self) -> SchedulerStatus:
        """Returns the scheduler's counters and gauges. Raises PagewireError."""
        return _to_status(self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    def requests(self, limit: int = 100) -> tuple[LiveRequestSummary, ...]:
        """Returns the live requests, oldest first, at most `limit`. Raises PagewireError."""
        request = debug_pb2.ListRequestsRequest(limit=limit)
        return _to_summaries(self._call(self._debug.ListRequests, request))

    def abort(self, *request_ids: str) -> tuple[str, ...]:
        """Aborts requests; returns the ids of those that were live. Raises PagewireError.

        Of a request with several outputs, each has an id of its own: the request's, and -0, -1, ...
        """
        request = pb.AbortRequest(request_ids=request_ids)
        return tuple(self._call(self._stub.Abort, request).aborted)

    def set_priority(self, request_id: str, priority: int) -> None:
        """Makes a live request more urgent, or less: smaller is more urgent.

        Raises NotFound when it is not live, FailedPrecondition unless the policy is `priority`.
        """
        request = pb.SetPriorityRequest(request_id=request_id)
        set_fields(request, {"priority": priority})
        self._call(self._stub.SetPriority, request)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks it had. Raises PagewireError."""
        request = pb.ResetPrefixCacheRequest()
        return self._call(self._stub.ResetPrefixCache, request).num_blocks

    def close(self) -> None:
        """Cancels every call and closes the connection."""
        self._channel.close()

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
    ) -> _Response:
        with translated(self._connection.target):
            return method(request, **self._connection.terms(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAdmin(_Operator):
    """A connection to a scheduler, for one event loop. Methods are those of Admin, awaited."""

    def _open(self) -> None:
        self._opener = AioOpener(self._connection)

    @cached_property
    def _stub(self) -> "SchedulerServiceAsyncStub":
        return SchedulerServiceStub(self._opener.channel)

    @cached_property
    def _debug(self) -> "DebugServiceAsyncStub":
        return DebugServiceStub(self._opener.channel)

    async def status(self) -> SchedulerStatus:
        """Returns the scheduler's counters and gauges. Raises PagewireError."""
        return _to_status(await self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    async def requests(self, limit: int = 100) -> tuple[LiveRequestSummary, ...]:
        """Returns the live requests, oldest first, at most `limit`. Raises PagewireError."""
        request = debug_pb2.ListRequestsRequest(limit=limit)
        return _to_summaries(await self._call(self._debug.ListRequests, request))

    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """Aborts requests; returns the ids of those that were live. Raises PagewireError.

        Of a request with several outputs, each has an id of its own: the request's, and -0, -1, ...
        """
        request = pb.AbortRequest(request_ids=request_ids)
        return tuple((await self._call(self._stub.Abort, request)).aborted)

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Makes a live request more urgent, or less: smaller is more urgent.

        Raises NotFound when it is not live, FailedPrecondition unless the policy is `priority`.
        """
        request = pb.SetPriorityRequest(request_id=request_id)
        set_fields(request, {"priority": priority})
        await self._call(self._stub.SetPriority, request)

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks it had. Raises PagewireError."""
        request = pb.ResetPrefixCacheRequest()
        return (await self._call(self._stub.ResetPrefixCache, request)).num_blocks

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        await self._opener.close()

    async def _call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
    ) -> _Response:
        with translated(self._connection.target):
            return await method(request, **self._connection.terms(None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
