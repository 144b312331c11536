"""W3C Trace Context: where a request stands in its caller's trace. Pure; no OpenTelemetry."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512  # at least so many must be passed on, and we pass on no more
# Versions after 00 may have more parts; their first four are those of version 00.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A caller's span. `traceparent` is valid and of version 00."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return self.traceparent[36:52]

    @property
    def is_sampled(self) -> bool:
        """True if the caller records this trace."""
        return bool(int(self.traceparent[53:], 16) & _SAMPLED)


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context of a call. None for one that is absent or invalid: its trace begins anew."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    is_other = version == "ff" or (version == "00" and more is not None)
    if is_other or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate.strip()
    is_text = state.isascii() and state.isprintable() and len(state) <= MAX_STATE_CHARS
    return TraceContext(f"00-{trace_id}-{span_id}-{flags}", state if is_text else "")


def context_of(headers: Mapping[str, str]) -> TraceContext | None:
    """The context in the headers or the metadata of a call, by their names in small letters."""
    parent = headers.get(TRACEPARENT)
    return None if parent is None else read_context(parent, headers.get(TRACESTATE, ""))


class ContextMessage(Protocol):
    """A context as a part of a message of ours."""

    traceparent: str
    tracestate: str


def context_from_proto(message: ContextMessage) -> TraceContext | None:
    """The context in a message."""
    return read_context(message.traceparent, message.tracestate) if message.traceparent else None
