"""Spans of requests in the scheduler, made at their end from the timeline that each has anyway.

So a traced request costs nothing while it runs. While none is traced, `contexts` is empty, and
nothing else is looked at.
"""

import time
from typing import TYPE_CHECKING

from scheduler_svc.core import Finished, FinishReason, Phase
from wire.tracing.context import TraceContext

if TYPE_CHECKING:
    from wire.tracing.spans import RequestSpan, Tracer

_NAMES = {Phase.WORKER_AWAY: "recovery", Phase.PREEMPTED: "preempted", Phase.PREPARING: "grammar"}
_EVENTS = {  # of the moment at which a request comes into a phase
    Phase.WORKER_AWAY: ("recovery", {"pagewire.lost": "worker"}),
    Phase.PREEMPTED: ("preemption", {}),
}
_GOOD = (FinishReason.STOP, FinishReason.LENGTH)


class RequestSpans:
    """The traced requests that are live, by id."""

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self.contexts: dict[str, TraceContext] = {}  # for workers: of each traced request
        self._tracer = tracer
        self._spans: dict[str, RequestSpan] = {}

    def accepted(self, request_id: str, parent: TraceContext | None, arrival_s: float) -> None:
        """Begins the span of a request; without a tracer, passes its context on."""
        if self._tracer is None:
            if parent is not None and parent.is_sampled:
                self.contexts[request_id] = parent
            return
        attributes = {"pagewire.request.id": request_id}
        span = self._tracer.begin("schedule", parent, arrival_s, attributes)
        if span.is_recorded:
            self._spans[request_id] = span
            self.contexts[request_id] = span.context

    def refused(
        self, request_id: str, parent: TraceContext | None, arrival_s: float, code: str
    ) -> None:
        """Tells of a request that was not accepted."""
        if self._tracer is None:
            return
        attributes = {"pagewire.request.id": request_id}
        span = self._tracer.begin("schedule", parent, arrival_s, attributes)
        span.end(time.monotonic(), error=code)

    def trace_id(self, request_id: str) -> str:
        """For logs; empty for a request that is not traced."""
        context = self.contexts.get(request_id)
        return "" if context is None else context.trace_id

    def ended(self, end: Finished) -> None:
        """Ends the span of a request, with one child for each stay in a phase."""
        if self.contexts.pop(end.request.request_id, None) is None:
            return
        span = self._spans.pop(end.request.request_id, None)
        if span is None:
            return
        now_s = time.monotonic()
        for stay in end.timeline.spans(now_s) if end.timeline is not None else ():
            if stay.phase in _EVENTS:
                name, attributes = _EVENTS[stay.phase]
                span.event(name, stay.begin_s, attributes)
            if stay.end_s > stay.begin_s:
                name = _NAMES.get(stay.phase, stay.phase.value)
                span.child(name, stay.begin_s, stay.end_s)
        counts: dict[str, int | list[str]] = {
            "gen_ai.usage.input_tokens": end.num_prompt_tokens,
            "gen_ai.usage.output_tokens": end.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": end.num_cached_tokens,
            "gen_ai.response.finish_reasons": [end.reason.value],
        }
        is_failure = end.reason not in (*_GOOD, FinishReason.ABORT)
        span.end(now_s, counts, error=end.reason.value if is_failure else "")

    def close(self) -> None:
        """Exports what is left."""
        if self._tracer is not None:
            self._tracer.close()
