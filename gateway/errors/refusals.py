"""One log line for each refused request: where, the code and the field at fault, never content.

A client may have chosen a field's name, or a part of it: what is no name of the API is a star.
"""

import logging
import re
from collections.abc import Container

from gateway.errors.request_errors import RequestError
from wire.log_rate import FewPerSecond

# Of the caller's requests; 499 and above are ends of requests, and no refusals.
FIRST_STATUS, LAST_STATUS = 400, 498
_PARTS = re.compile(r"[^.\[\]]+")

log = logging.getLogger("gateway.errors.refusals")
log.addFilter(FewPerSecond())


def note(error: RequestError, where: str, known: Container[str]) -> None:
    """Logs a refusal; `known` holds the names of the API's fields."""
    wire = error.wire
    if FIRST_STATUS <= wire.http_status <= LAST_STATUS:
        field = f", field {loggable(error.field, known)}" if error.field is not None else ""
        log.info("refused %s: %d %s%s", where, wire.http_status, wire.code, field)


def loggable(field: str, known: Container[str]) -> str:
    """The field with a star for each part that is neither a known name nor an index."""

    def shown(part: re.Match[str]) -> str:
        name = part.group()
        return name if name in known or (name.isdecimal() and len(name) < 6) else "*"

    return _PARTS.sub(shown, field)
