"""API keys at the gateway, the same for HTTP and gRPC: who calls, and whose requests these are.

Probes and reflection need no key: they reveal which model runs, but nothing about requests.
"""

from contextvars import ContextVar

from gateway.errors.request_errors import ErrorKind, RequestError
from wire.identity.access import CALLER, Access, AccessDenied, require
from wire.identity.keys import Caller
from wire.identity.roles import Role

# Whom the current task serves, as budgets count callers: a key, or an address without keys.
CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")


def authenticate(
    access: Access, authorization: str | None, what: str, role: Role = Role.USER
) -> Caller:
    """Who sends an HTTP request; raises RequestError unless a key of the role is in the header."""
    try:
        caller = access.identify(authorization)
        require(caller, role, what)
    except AccessDenied as denied:
        kind = ErrorKind.FORBIDDEN if denied.is_known else ErrorKind.UNAUTHENTICATED
        raise RequestError(kind, denied.message, field="authorization") from denied
    return caller


def tenant_of_key() -> str | None:
    """The tenant of the key that the current task serves; None where callers name their own."""
    caller = CALLER.get()
    return None if caller is None else caller.tenant


def check_tenant(field: str, named: str) -> None:
    """Raises RequestError when a caller with a key of one tenant names another."""
    own = tenant_of_key()
    if own is not None and named not in ("", own):
        problem = f"{field}: the key is one of tenant {own!r}, and of no other"
        raise RequestError(ErrorKind.FORBIDDEN, problem, field=field)
