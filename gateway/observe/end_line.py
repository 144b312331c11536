"""The line of the log for an output that is over, at the level debug."""

import logging

from gateway.request.generation import Finish
from wire.logs.request import CURRENT, LoggedRequest

log = logging.getLogger("gateway.requests")


def log_end(request_id: str, finish: Finish | None, error_code: str) -> None:
    """Writes it: names and counts."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    current = CURRENT.get()
    about = LoggedRequest(request_id, current.trace_id if current else "").extra
    if finish is None:
        log.debug("an output failed: %s", error_code, extra=about)
        return
    usage = finish.usage
    log.debug(
        "an output ended: %s, %d prompt tokens, %d of them cached, %d output tokens",
        finish.reason.value,
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
        extra=about,
    )
