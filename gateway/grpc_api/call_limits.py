"""Counts the open calls of each client and their messages, together with its HTTP requests."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from gateway.callers.body_budget import BodyBudget
from gateway.edge.clients import OpenRequests, client_at
from gateway.grpc_api.statuses import METHOD, Context, RefusalsAsStatuses
from wire.identity.roles import METHOD_ROLES, Role

Handler = Any  # grpc.RpcMethodHandler or None; its class takes no parameters at run time
WEIGHT = 2  # bytes of memory of each byte: a message lives as long as the texts made of it
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls of a client that has too many open; probes and reflection are not counted.

    SlowReaders must come after it: a handler that streams is a coroutine here.
    """

    def __init__(self, open_requests: OpenRequests, bodies: BodyBudget) -> None:
        self._open = open_requests
        self._bodies = bodies

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler, counted while it runs."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or METHOD_ROLES.get(method) is Role.OPEN:
            return handler
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            behavior = self._counted(method, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(behavior, *codecs)
        if handler.unary_stream is not None:
            behavior = self._counted(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(behavior, *codecs)
        return handler

    def _counted(self, method: str, behavior: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def counted(request: Any, context: Context) -> Any:
            METHOD.set(method)
            async with RefusalsAsStatuses(context):
                address = _address(context.peer())
                with self._open.one_of(address), self._bodies.share_of(client_at(address)) as share:
                    if isinstance(request, Message):
                        share.hold(request.ByteSize(), WEIGHT)
                    return await behavior(request, context)

        return counted


def _address(peer: str) -> str:
    """The address of `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`, as HTTP names it."""
    _, _, address = peer.partition(":")
    host, _, _ = address.rpartition(":")
    return host.removeprefix("%5B").removesuffix("%5D") or peer
