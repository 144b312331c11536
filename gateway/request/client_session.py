"""The session of a request, as its client tells it: hints for the scheduler's prefix cache."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

MAX_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class ClientSession:
    """A session and when it comes back; what its client does not say is empty or None."""

    session_id: str = ""  # of requests that go on with one another
    parent_id: str = ""  # of the session that awaits this one
    ttl_s: float | None = None  # within which its next request is expected; 0: none follows
    prefix_key: str = ""  # of requests that begin alike


def name_of(told: Any) -> str:
    """A name for the scheduler: longer ones by their hash; empty for what is no name."""
    if isinstance(told, bool) or not isinstance(told, str | int):
        return ""
    try:
        encoded = str(told).encode("utf-8", "backslashreplace")
    except ValueError:  # an integer of thousands of digits
        return ""
    return encoded.decode() if len(encoded) <= MAX_NAME_BYTES else sha256(encoded).hexdigest()
