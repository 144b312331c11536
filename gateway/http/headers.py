"""Request headers: id, tenant, priority, timeout and trace."""

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Protocol

from gateway.callers.auth import check_tenant, tenant_of_key
from gateway.callers.request_ids import REQUEST_ID, RULE, is_plain, new_id, plain_or_none
from gateway.errors import limits, notices
from gateway.errors.request_errors import RequestError, invalid
from gateway.request.generation import Standing
from wire.logs.request import about
from wire.requests.numbers import LONGEST_TIMEOUT_S
from wire.tracing.context import context_of

TENANT = "x-tenant"
TIMEOUT_S = "x-timeout-s"


class Asking(Protocol):
    """Fields of a body that identify the caller."""

    priority: int | None
    user: str | None


def given_id_of(headers: Mapping[str, str], in_body: str | None) -> str | None:
    """The id that the header or else the body gives; None where none is given that may be.

    Raises RequestError for one of a body that may not be, where its caller would not hear of it.
    """
    if (in_header := plain_or_none(headers.get(REQUEST_ID))) is not None:
        return in_header
    if in_body and not is_plain(in_body):
        notices.ignore("request_id", f"was replaced: {RULE}")
    return plain_or_none(in_body)


def request_id_of(headers: Mapping[str, str], in_body: str | None, prefix: str) -> str:
    """The id: the header's, the body's or a new one. The task's log lines name it from now on."""
    request_id = given_id_of(headers, in_body) or new_id(prefix)
    about(request_id)
    return request_id


def standing_of(body: Asking, headers: Mapping[str, str]) -> Standing:
    """The standing of a request; the tenant is the key's, the header's or else the `user`."""
    timeout_s, trace = _timeout_s(headers.get(TIMEOUT_S)), context_of(headers)
    if (own := tenant_of_key()) is not None:  # `user` then is a user within it
        check_tenant(TENANT, headers.get(TENANT, ""))
        return Standing(body.priority or 0, own, timeout_s, is_own_tenant=True, trace=trace)
    is_named = TENANT in headers
    tenant = headers[TENANT] if is_named else _short(body.user or "")
    try:
        return Standing(body.priority or 0, tenant, timeout_s, trace=trace)
    except RequestError as error:
        if error.field != "tenant":
            raise
        name = TENANT if is_named else "user"
        raise invalid(name, error.message.removeprefix("tenant: ")) from error


def _short(user: str) -> str:
    """A user as a tenant: longer names, which are mere bookkeeping for others, by their hash."""
    encoded = user.encode("utf-8", "backslashreplace")
    return user if len(encoded) <= limits.MAX_TENANT_BYTES else sha256(encoded).hexdigest()


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        problem = f"must be a number of seconds above 0, at most {LONGEST_TIMEOUT_S:g}"
        raise invalid(TIMEOUT_S, problem)
    return timeout_s
