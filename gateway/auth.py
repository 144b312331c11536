"""API key check, the same for HTTP and gRPC.

Probes and reflection need no key: they reveal which model runs, but nothing about requests.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from gateway.errors import ErrorKind, RequestError

SCHEME = "bearer"
OPEN_GRPC_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class ApiKey:
    """Compares a caller's key with the configured one in constant time."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, authorization: str | None) -> None:
        """Raises RequestError unless the header is `Bearer` and the key."""
        scheme, _, given = (authorization or "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
        if scheme.lower() != SCHEME or not is_right:
            problem = "authorization: send the gateway's key as `Authorization: Bearer KEY`"
            raise RequestError(ErrorKind.UNAUTHENTICATED, problem, field="authorization")


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses gRPC calls without the key."""

    def __init__(self, api_key: ApiKey) -> None:
        self._api_key = api_key

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Asked, Answered] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Asked, Answered] | None":
        """Lets the call through or answers it with UNAUTHENTICATED."""
        method = str(handler_call_details.method)
        if not method.startswith(OPEN_GRPC_SERVICES):
            metadata = dict(handler_call_details.invocation_metadata or ())
            try:
                self._api_key.check(_text(metadata.get("authorization")))
            except RequestError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _refusal(error: RequestError) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(error.wire.grpc_code, error.message)

    return grpc.unary_unary_rpc_method_handler(refuse)
