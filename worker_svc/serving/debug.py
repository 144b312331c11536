"""DebugService of the worker: answers from snapshots of its state, never waits for a step."""

import time
from collections.abc import Iterator
from typing import NoReturn

import grpc
import numpy as np

from pagewire.v1 import debug_pb2, debug_pb2_grpc
from wire.requests.profile import ProfileRefused
from wire.sampling import PENALTIES, changing
from worker_svc.protocol.step import ComputedStep, RowSampling
from worker_svc.runner.batch_state import HostSlots, Occupant
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.serving.profiling import Profiling
from worker_svc.startup.lifecycle import Lifecycle

SERVICE_NAME = "pagewire.v1.DebugService"
DEFAULT_REQUESTS = 100
DEFAULT_STEPS = 20


class DebugService(debug_pb2_grpc.DebugServiceServicer):
    """Handlers of DebugService."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._profiling = Profiling()

    def ProfileSteps(
        self, request: debug_pb2.ProfileStepsRequest, context: grpc.ServicerContext
    ) -> Iterator[debug_pb2.ProfileStepsResponse]:
        try:
            yield from self._profiling.record(self._lifecycle.runner, request, context)
        except ProfileRefused as refused:
            _refuse(context, refused.code, str(refused))

    def ListRequests(
        self, request: debug_pb2.ListRequestsRequest, context: grpc.ServicerContext
    ) -> debug_pb2.ListRequestsResponse:
        live = _live(self._lifecycle.runner)
        shown = live[: request.limit or DEFAULT_REQUESTS]
        return debug_pb2.ListRequestsResponse(requests=shown, total=len(live))

    def DescribeRequest(
        self, request: debug_pb2.DescribeRequestRequest, context: grpc.ServicerContext
    ) -> debug_pb2.DescribeRequestResponse:
        runner = self._lifecycle.runner
        if runner is not None:
            table, now_s = runner.state.table, time.monotonic()
            for slot, occupant in _oldest_first(table):
                if occupant.request_id == request.request_id:
                    summary = _summary(slot, occupant, table.columns[slot], now_s)
                    block_ids = runner.state.block_tables[slot, : summary.num_blocks].tolist()
                    return debug_pb2.DescribeRequestResponse(
                        request=summary,
                        block_ids=block_ids,
                        sampling=_sampling(occupant.sampling),
                        story=[f"entered slot {slot} {summary.age_s:.1f} s ago"],
                    )
        return _refuse(
            context,
            grpc.StatusCode.NOT_FOUND,
            f"request_id: {request.request_id!r} holds no slot of this worker",
        )

    def Explain(
        self, request: debug_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> debug_pb2.ExplainResponse:
        return _refuse(
            context,
            grpc.StatusCode.UNIMPLEMENTED,
            "the scheduler knows why requests wait: ask its DebugService",
        )

    def DumpBlockPool(
        self, request: debug_pb2.DumpBlockPoolRequest, context: grpc.ServicerContext
    ) -> debug_pb2.DumpBlockPoolResponse:
        return _refuse(
            context,
            grpc.StatusCode.UNIMPLEMENTED,
            "the scheduler owns the block pool: ask its DebugService",
        )

    def ListSteps(
        self, request: debug_pb2.ListStepsRequest, context: grpc.ServicerContext
    ) -> debug_pb2.ListStepsResponse:
        runner = self._lifecycle.runner
        records = list(runner.records)[::-1] if runner else []
        shown = records[: request.limit or DEFAULT_STEPS]
        return debug_pb2.ListStepsResponse(steps=[_step(record) for record in shown])


def _live(runner: ModelRunner | None) -> list[debug_pb2.RequestSummary]:
    """Summaries of all occupied slots, the oldest occupant first."""
    if runner is None:
        return []
    table, now_s = runner.state.table, time.monotonic()  # one snapshot: tables are immutable
    return [
        _summary(slot, occupant, table.columns[slot], now_s)
        for slot, occupant in _oldest_first(table)
    ]


def _oldest_first(table: HostSlots) -> list[tuple[int, Occupant]]:
    occupied = [(slot, occupant) for slot, occupant in enumerate(table.occupants) if occupant]
    return sorted(occupied, key=lambda pair: pair[1].entered_s)


def _refuse(context: grpc.ServicerContext, status: grpc.StatusCode, reason: str) -> NoReturn:
    context.abort(status, reason)


def _summary(
    slot: int, occupant: Occupant, counts: np.void, now_s: float
) -> debug_pb2.RequestSummary:
    num_prompt, num_computed = int(counts["num_prompt"]), int(counts["num_computed"])
    num_output = int(counts["num_tokens"]) - num_prompt
    num_blocks = int(counts["num_blocks"])
    return debug_pb2.RequestSummary(
        request_id=occupant.request_id,
        state="running",
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_computed_tokens=num_computed,
        num_blocks=num_blocks,
        slot=slot,
        age_s=now_s - occupant.entered_s,
        summary=f"slot {slot}: {num_prompt} prompt and {num_output} output tokens, "
        f"{num_computed} computed, {num_blocks} blocks",
    )


def _sampling(sampling: RowSampling) -> str:
    if sampling.is_greedy:
        words = ["greedy"]
    else:
        words = [f"temperature {sampling.temperature:g}", f"seed {sampling.seed}"]
        words += changing(sampling, "top_k", "top_p", "min_p")
    if sampling.min_tokens:
        words.append(f"min_tokens {sampling.min_tokens}")
    words += changing(sampling, *PENALTIES)
    lists = (
        ("biased tokens", sampling.logit_bias),
        ("allowed tokens", sampling.allowed_token_ids),
        ("bad words", sampling.bad_words_token_ids),
        ("tokens with log probabilities", sampling.logprob_token_ids),
    )
    words += [f"{len(entries)} {name}" for name, entries in lists if entries]
    if sampling.num_top_logprobs is not None:
        words.append(f"logprobs {sampling.num_top_logprobs}")
    if sampling.num_prompt_logprobs is not None:
        words.append(f"prompt_logprobs {sampling.num_prompt_logprobs}")
    if sampling.pooling is not None:
        words.append(f"pooling {sampling.pooling.value}")
    if sampling.stop_token_ids:
        words.append("stop tokens " + ", ".join(map(str, sampling.stop_token_ids)))
    return "; ".join(words)


def _step(record: ComputedStep) -> debug_pb2.StepSummary:
    num_rows, num_tokens = len(record.slots), int(record.num_scheduled.sum())
    num_prefill = num_rows - record.num_decode_rows
    timings = record.timings
    outcome = f"{record.duration_us} us, the device idle for {timings.idle_us} us before"
    if record.error:
        outcome = f"failed: {record.error}"
    return debug_pb2.StepSummary(
        step_id=record.step_id,
        num_prefill_rows=num_prefill,
        num_decode_rows=record.num_decode_rows,
        num_tokens=num_tokens,
        rows=[
            debug_pb2.StepRow(
                request_id=request_id,
                slot=slot,
                num_computed_tokens=computed,
                num_scheduled_tokens=scheduled,
            )
            for request_id, slot, computed, scheduled in zip(
                record.request_ids,
                record.slots.tolist(),
                record.num_computed.tolist(),
                record.num_scheduled.tolist(),
                strict=True,
            )
        ],
        duration_us=record.duration_us,
        busy_us=timings.busy_us,
        idle_us=timings.idle_us,
        summary=f"step {record.step_id}: {num_prefill} prefill and {record.num_decode_rows} "
        f"decode rows, {num_tokens} tokens, {outcome}",
    )
