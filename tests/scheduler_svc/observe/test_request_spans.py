"""Spans of requests in the scheduler: every phase, and what is passed on to the worker."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.core import Finished, FinishReason, Phase, Request, Timeline
from scheduler_svc.observe.request_spans import RequestSpans
from simulator.workers.fake_worker import FakeWorker
from tests.otlp_sink import OtlpSink
from wire.columns import INT32, unpack
from wire.tracing.context import read_context
from wire.tracing.options import TracingOptions
from wire.tracing.spans import Tracer

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]

TRACE_ID = "a" * 32
PARENT = read_context(f"00-{TRACE_ID}-{'b' * 16}-01", "vendor=1")
UNSAMPLED = read_context(f"00-{TRACE_ID}-{'b' * 16}-00")
LIFE = (
    Phase.PREPARING,
    Phase.QUEUE,
    Phase.PREFILL,
    Phase.DECODE,
    Phase.PREEMPTED,
    Phase.PREFILL,
    Phase.DECODE,
    Phase.WORKER_AWAY,
    Phase.PREEMPTED,
    Phase.PREFILL,
    Phase.DECODE,
)


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    sink = OtlpSink()
    sink.start()
    yield sink
    sink.stop()


def ended(request_id: str, begin_s: float, reason: FinishReason = FinishReason.STOP) -> Finished:
    """A request that spent a second in each phase of its life."""
    timeline = Timeline(begin_s)
    for number, phase in enumerate(LIFE):
        timeline.enter(phase, begin_s + number)
    prompt = unpack(INT32.type(7).tobytes(), name="prompt")
    request = Request(request_id, prompt, arrival_s=begin_s)
    return Finished(request, reason, 7, 30, 4, timeline=timeline)


def test_each_stay_in_a_phase_is_a_span(sink: OtlpSink) -> None:
    spans = RequestSpans(Tracer(TracingOptions(f"http://127.0.0.1:{sink.port}"), "scheduler"))
    begin_s = time.monotonic() - len(LIFE)
    spans.accepted("r", PARENT, begin_s)
    passed_on = spans.contexts["r"]
    assert passed_on.trace_id == TRACE_ID and passed_on.tracestate == "vendor=1"
    spans.ended(ended("r", begin_s))
    assert not spans.contexts
    spans.ended(ended("r", begin_s))  # of another with that id, which is not traced
    spans.close()
    found = sorted((one.span for one in sink.of(TRACE_ID)), key=lambda s: s.start_time_unix_nano)
    (root,) = [span for span in found if span.name == "schedule"]
    parts = [span for span in found if span is not root]
    assert [span.name for span in parts] == [
        *("grammar", "queue", "prefill", "decode", "preempted", "prefill", "decode"),
        *("recovery", "preempted", "prefill", "decode"),
    ]
    assert all(part.parent_span_id == root.span_id for part in parts)
    assert [event.name for event in root.events] == ["preemption", "recovery", "preemption"]
    seconds = [(p.end_time_unix_nano - p.start_time_unix_nano) / 1e9 for p in parts[:-1]]
    assert seconds == pytest.approx([1.0] * (len(LIFE) - 1))
    assert passed_on.span_id == root.span_id.hex()
    told = next(one for one in sink.of(TRACE_ID) if one.span.name == "schedule").attributes
    assert told["gen_ai.usage.output_tokens"] == 30 and told["pagewire.request.id"] == "r"


def test_what_is_not_sampled_leaves_nothing(sink: OtlpSink) -> None:
    spans = RequestSpans(Tracer(TracingOptions(f"http://127.0.0.1:{sink.port}", 0.0), "scheduler"))
    spans.accepted("hidden", UNSAMPLED, 0.0)
    spans.accepted("by ratio", None, 0.0)
    assert not spans.contexts
    spans.close()
    assert not sink.received


def test_a_failure_is_told_by_its_reason(sink: OtlpSink) -> None:
    spans = RequestSpans(Tracer(TracingOptions(f"http://127.0.0.1:{sink.port}"), "scheduler"))
    now_s = time.monotonic()
    spans.accepted("late", PARENT, now_s)
    spans.ended(ended("late", now_s, FinishReason.EXPIRED))
    spans.refused("full", PARENT, now_s, "RESOURCE_EXHAUSTED")
    spans.close()
    errors = {one.attributes["error.type"] for one in sink.received if one.span.name == "schedule"}
    assert errors == {"expired", "RESOURCE_EXHAUSTED"}


async def test_without_a_tracer_the_worker_gets_the_callers_context(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, types_pb2.TraceContext] = {}
    answer = FakeWorker._answer

    async def noting(
        worker: FakeWorker, step: worker_pb2.SchedulerOutput
    ) -> worker_pb2.ModelRunnerOutput:
        seen.update((new.request_id, new.trace) for new in step.new_sequences)
        return await answer(worker, step)

    monkeypatch.setattr(FakeWorker, "_answer", noting)
    assert PARENT is not None and UNSAMPLED is not None
    async with make_cluster() as cluster:
        for request_id, context in (("seen", PARENT), ("unsampled", UNSAMPLED), ("none", None)):
            given = [] if context is None else [("traceparent", context.traceparent)]
            call = cluster.scheduler.Generate(
                scheduler_pb2.SchedulerServiceGenerateRequest(
                    request_id=request_id,
                    prompt_token_ids=[1, 2, 3],
                    sampling=types_pb2.SamplingParams(max_tokens=3, ignore_eos=True),
                ),
                metadata=given,
            )
            async for _ in call:
                pass
        assert seen["seen"].traceparent == PARENT.traceparent
        assert not seen["unsampled"].traceparent and not seen["none"].traceparent
        assert not cluster.engine.spans.contexts, "nothing is kept of what has ended"
