"""Fields of a request that have no effect, collected so that its caller hears of them.

An HTTP layer collects notices and answers with them in a header. Where nothing collects them (gRPC,
and HTTP with --strict-requests) a request is refused instead: nothing is ignored silently.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gateway.errors.request_errors import unsupported

MOST_NOTICES = 16
MOST_NAME_CHARACTERS = 64  # of a name that the caller chose

_NOTICES: ContextVar[dict[str, None] | None] = ContextVar("NOTICES", default=None)


@contextmanager
def collected() -> Iterator[dict[str, None]]:
    """Collects the notices of the current task, and of tasks that it starts, in order."""
    notices: dict[str, None] = {}
    token = _NOTICES.set(notices)
    try:
        yield notices
    finally:
        _NOTICES.reset(token)


def are_collected() -> bool:
    """True if the caller will hear of what is ignored."""
    return _NOTICES.get() is not None


def ignore(field: str, problem: str) -> None:
    """Notes that a field has no effect. Raises RequestError where the caller would not hear it."""
    notices = _NOTICES.get()
    if notices is None:
        raise unsupported(field, problem)
    if len(notices) < MOST_NOTICES:
        # ASCII without control characters: the name may be anything, and a header holds it.
        notices[f"{json.dumps(field)[1:-1]}: {problem}"] = None
