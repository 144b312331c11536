"""The span of one output, from its arrival to its end. Names and counts, never text.

Attributes are those of OpenTelemetry's conventions for generative AI where they fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.chat.conversation import Conversation
from gateway.observe.sources import TimedArrivals, TimedOutput
from gateway.request.generation import Finish, GenerationRequest
from wire.logs.request import about
from wire.tracing.context import TraceContext

if TYPE_CHECKING:
    from wire.tracing.spans import RequestSpan, Tracer

_SAMPLING = {  # the conventions' names by ours
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
MAX_NAME = 256  # characters of what a client calls the model


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """When an output was submitted and when its first token came, in seconds; None: not so far."""

    submitted_s: float | None = None
    first_token_s: float | None = None
    losses_s: Sequence[float] = ()  # of a scheduler, after which it went on at the next

    @classmethod
    def of(cls, live: TimedArrivals | None, progress: TimedOutput | None) -> "OutputTimes":
        """The facts of an output, which may not have been submitted."""
        if live is None or progress is None:
            return cls()
        return cls(progress.started_s, progress.first_token_s, live.losses_s)


class OutputSpan:
    """A span that has begun. Of an output that is not sampled it only says so to the scheduler."""

    __slots__ = ("_span", "context")

    def __init__(self, span: "RequestSpan") -> None:
        self._span = span
        self.context: TraceContext = span.context  # for the scheduler

    @classmethod
    def begin(
        cls, tracer: "Tracer", request: GenerationRequest, model: str, now_s: float
    ) -> "OutputSpan":
        """Begins the span of a request; `model` is what is served, empty before it is known."""
        operation = _operation(request)
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pagewire",
            "gen_ai.request.model": (request.model or model)[:MAX_NAME],
            "gen_ai.response.model": model,
            "pagewire.request.id": request.request_id,
        }
        for name, attribute in _SAMPLING.items():
            if (value := getattr(request.sampling, name)) is not None:
                # More than 64 bits are no number of a trace.
                attributes[attribute] = value if abs(value) < 1 << 63 else str(value)
        # Not the name that a client sends: spans of one kind have one name.
        span = tracer.begin(
            f"{operation} {model}".rstrip(), request.standing.trace, now_s, attributes
        )
        if span.is_recorded:
            about(request.request_id, span.trace_id)
        return cls(span)

    def prepared(self, began_s: float, now_s: float, num_prompt_tokens: int) -> None:
        """Adds the time of template, tokenizer and, with a structure, its grammar."""
        counts = {"gen_ai.usage.input_tokens": num_prompt_tokens}
        self._span.child("tokenize", began_s, now_s, counts)

    def end(
        self,
        times: OutputTimes,
        finish: Finish | None,
        error_code: str,
        now_s: float,
    ) -> None:
        """Ends it, with how the output ended; the code counts where it did not finish."""
        if not self._span.is_recorded:
            return
        if times.submitted_s is not None:
            self._span.event("submitted", times.submitted_s)
        for lost_s in times.losses_s:
            self._span.event("recovery", lost_s, {"pagewire.lost": "scheduler"})
        if times.first_token_s is not None:
            self._span.event("first token", times.first_token_s)
            self._span.child("stream", times.first_token_s, now_s)
        if finish is None:
            self._span.end(now_s, error=error_code)
            return
        usage = finish.usage
        self._span.end(
            now_s,
            {
                "gen_ai.response.finish_reasons": [finish.reason.value],
                "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
                "gen_ai.usage.output_tokens": usage.num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
            },
        )


def _operation(request: GenerationRequest) -> str:
    if request.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompt, Conversation) else "text_completion"
