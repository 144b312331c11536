"""Spans of traced requests in the worker, one for each stay in a slot, from the times of steps.

A stay has a child for its prefill, with an event per chunk, and one for its decode steps. Nothing
is done for rows of other requests.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.step import IntColumn, NewSequence, StepInput, StepTimings

if TYPE_CHECKING:
    from wire.tracing.spans import RequestSpan, Tracer

MAX_CHUNKS = 64  # that have an event


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, in batch order, and its times."""

    slots: IntColumn
    num_scheduled: IntColumn
    samples: NDArray[np.bool_]
    timings: StepTimings


@dataclass(slots=True)
class _Part:
    """Steps of one kind, one after the other."""

    begin_s: float = 0.0
    end_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    forward_us: int = 0
    sample_us: int = 0

    def add(self, begin_s: float, end_s: float, num_tokens: int, timings: StepTimings) -> None:
        """Adds a step."""
        if not self.num_steps:
            self.begin_s = begin_s
        self.end_s = end_s
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.forward_us += timings.forward_us
        self.sample_us += timings.sample_us

    @property
    def attributes(self) -> dict[str, int]:
        """For its span; the times are those of whole steps, which other rows share."""
        return {
            "pagewire.steps": self.num_steps,
            "pagewire.tokens": self.num_tokens,
            "pagewire.forward_us": self.forward_us,
            "pagewire.sample_us": self.sample_us,
        }


@dataclass(slots=True)
class _Stay:
    span: "RequestSpan"
    prefill: _Part = field(default_factory=_Part)
    decode: _Part = field(default_factory=_Part)
    chunks: list[tuple[str, float, dict[str, int]]] = field(default_factory=list)
    has_sampled: bool = False


class RequestStays:
    """The traced requests that hold a slot, by slot."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._stays: dict[int, _Stay] = {}
        # Steps are recorded by the thread that answers, and those that fail by the one that
        # launches.
        self._lock = threading.Lock()

    def stepped(self, step: StepInput, rows: StepRows, begin_s: float) -> None:
        """Notes a step that worked, which began at `begin_s` of the performance counter."""
        end_s = time.perf_counter()
        with self._lock:
            if self._stays:
                leaving = list(self._stays) if step.reset else step.freed_slots.tolist()
                for slot in leaving:
                    self._leave(slot, begin_s)
            for new in step.new_sequences:
                if new.trace is not None and new.trace.is_sampled:
                    self._enter(new, begin_s)
            if not self._stays:
                return
            for row, slot in enumerate(rows.slots.tolist()):
                if (stay := self._stays.get(slot)) is not None:
                    num_tokens, samples = int(rows.num_scheduled[row]), bool(rows.samples[row])
                    _note(stay, num_tokens, samples, begin_s, end_s, rows.timings)

    def close(self) -> None:
        """Ends all, and exports what is left."""
        with self._lock:
            for slot in list(self._stays):
                self._leave(slot, time.perf_counter())
        self._tracer.close()

    def _enter(self, new: NewSequence, now_s: float) -> None:
        attributes: dict[str, str | int] = {
            "pagewire.request.id": new.request_id,
            "pagewire.slot": new.slot,
            "pagewire.tokens": len(new.token_ids),
            "pagewire.cached_tokens": new.num_computed_tokens,
        }
        span = self._tracer.begin("compute", new.trace, now_s, attributes)
        if span.is_recorded:
            self._stays[new.slot] = _Stay(span)

    def _leave(self, slot: int, now_s: float) -> None:
        stay = self._stays.pop(slot, None)
        if stay is None:
            return
        for name, part, events in (
            ("prefill", stay.prefill, stay.chunks),
            ("decode", stay.decode, []),
        ):
            if part.num_steps:
                stay.span.child(name, part.begin_s, part.end_s, part.attributes, events)
        last_s = max(stay.prefill.end_s, stay.decode.end_s)
        stay.span.end(last_s or now_s)


def _note(
    stay: _Stay,
    num_tokens: int,
    samples: bool,
    begin_s: float,
    end_s: float,
    timings: StepTimings,
) -> None:
    if stay.has_sampled:
        stay.decode.add(begin_s, end_s, num_tokens, timings)
        return
    stay.prefill.add(begin_s, end_s, num_tokens, timings)
    stay.has_sampled = samples
    if len(stay.chunks) < MAX_CHUNKS:
        stay.chunks.append(("chunk", begin_s, {"pagewire.tokens": num_tokens}))
