"""Ids of requests: those that callers may give, and new ones.

An id comes back in answers and headers, and stands in logs, so only plain text is taken over.
"""

import uuid

from gateway.errors import limits
from wire.logs.request import CURRENT

REQUEST_ID = "x-request-id"  # a retry with the same id finds its reservation
RULE = f"an id is 1 to {limits.MAX_REQUEST_ID_BYTES} printable ASCII characters"


PREFIX = "req-"  # of ids of requests that have no other


def current_id() -> str:
    """The id of the request that the current task serves."""
    current = CURRENT.get()
    return new_id(PREFIX) if current is None else current.request_id


def is_plain(request_id: str) -> bool:
    """True if an id may be repeated as it is."""
    is_short = 0 < len(request_id) <= limits.MAX_REQUEST_ID_BYTES
    return is_short and request_id.isascii() and request_id.isprintable()


def plain_or_none(request_id: str | None) -> str | None:
    """The id, unless there is none or it is not plain."""
    return request_id if request_id and is_plain(request_id) else None


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}{uuid.uuid4().hex}"
