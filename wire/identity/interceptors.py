"""gRPC server interceptors that let permitted calls through, asyncio and threaded."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from wire.identity.access import CALLER, Access, AccessDenied
from wire.identity.keys import Caller

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class AioAccessInterceptor(grpc.aio.ServerInterceptor):
    """For grpc.aio; also makes the caller known to the handler's task."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Asked, Answered] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Asked, Answered] | None":
        """Lets the call through or answers UNAUTHENTICATED or PERMISSION_DENIED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            CALLER.set(_check(self._access, handler_call_details))
        except AccessDenied as denied:
            return _refusing(_abort_aio(denied), handler)
        return handler


class AccessInterceptor(grpc.ServerInterceptor):
    """For threaded servers."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Asked, Answered] | None"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Asked, Answered] | None":
        """Lets the call through or answers UNAUTHENTICATED or PERMISSION_DENIED."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        try:
            _check(self._access, handler_call_details)
        except AccessDenied as denied:
            return _refusing(_abort(denied), handler)
        return handler


def _check(access: Access, details: grpc.HandlerCallDetails) -> Caller | None:
    found = [value for name, value in details.invocation_metadata or () if name == "authorization"]
    if len(found) > 1:
        raise AccessDenied("authorization: is there twice", is_known=False)
    return access.check(str(details.method), _text(found[0]) if found else None)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _code(denied: AccessDenied) -> grpc.StatusCode:
    return grpc.StatusCode.PERMISSION_DENIED if denied.is_known else grpc.StatusCode.UNAUTHENTICATED


def _abort(denied: AccessDenied) -> Callable[[Any, Any], NoReturn]:
    def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
        context.abort(_code(denied), denied.message)

    return refuse


def _abort_aio(denied: AccessDenied) -> Callable[[Any, Any], Awaitable[NoReturn]]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(_code(denied), denied.message)

    return refuse


def _refusing(
    refuse: Callable[[Any, Any], Any], handler: "grpc.RpcMethodHandler[Any, Any]"
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that refuses at once: a stream need not send a message first."""
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
