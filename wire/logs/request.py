"""The request that a line of the log is about: that of the current task, or one that is named."""

from contextvars import ContextVar
from dataclasses import dataclass

MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """The request of a line. An empty trace id: it is not traced."""

    request_id: str
    trace_id: str = ""

    @property
    def extra(self) -> dict[str, str]:
        """For `extra=` of a line that is written outside of the request's task."""
        return {"request_id": self.request_id, "trace_id": self.trace_id}


# Of the request that the current task serves.
CURRENT: ContextVar[LoggedRequest | None] = ContextVar("CURRENT", default=None)


def about(request_id: str, trace_id: str = "") -> None:
    """Names the request in all further lines of the current task."""
    CURRENT.set(LoggedRequest(request_id[:MAX_ID_CHARS], trace_id))
