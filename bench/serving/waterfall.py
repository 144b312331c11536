"""Parts of the time to an idle server's first token: one tier after another.

Each tier's own time is the difference of two medians, so the parts add up to what a client sees.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from pagewire.v1 import debug_pb2, debug_pb2_grpc

STEPS_KEPT = 4096
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """Medians over the steps that computed one prompt and nothing else, in milliseconds."""

    device_ms: float  # of them, what the device computed
    worker_ms: float  # from taking the step to its tokens
    scheduler_ms: float  # from sending the step to applying its output


def prompt_steps(scheduler: str, worker: str) -> PromptSteps:
    """Reads both sides' lists of steps. Raises StatisticsError if no prompt was alone."""
    at_worker, at_scheduler = _alone(worker), _alone(scheduler)
    return PromptSteps(
        statistics.median(step.busy_us for step in at_worker) / 1e3,
        statistics.median(step.duration_us for step in at_worker) / 1e3,
        statistics.median(step.duration_us for step in at_scheduler) / 1e3,
    )


def _alone(address: str) -> list[debug_pb2.StepSummary]:
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, unlimited) as channel:
        stub = debug_pb2_grpc.DebugServiceStub(channel)
        request = debug_pb2.ListStepsRequest(limit=STEPS_KEPT)
        steps = stub.ListSteps(request, timeout=TIMEOUT_S).steps
    return [s for s in steps if s.num_prefill_rows == 1 and not s.num_decode_rows]


def table(steps: PromptSteps, ttft_ms: Mapping[str, float]) -> list[str]:
    """Lines with each part's time, and the sum so far; `ttft_ms` is the median by API."""
    direct = ttft_ms["scheduler"]
    parts = [
        ("device computes the prompt", steps.device_ms),
        ("worker: reads the step, launches, answers", steps.worker_ms - steps.device_ms),
        ("wire between scheduler and worker", steps.scheduler_ms - steps.worker_ms),
        ("scheduler: submit, plan, deliver; its client", direct - steps.scheduler_ms),
    ]
    lines, so_far = [f"{'first token of an idle server':<46}{'ms':>8}{'sum':>8}"], 0.0
    for name, part_ms in parts:
        so_far += part_ms
        lines.append(f"{name:<46}{part_ms:>8.2f}{so_far:>8.2f}")
    for api in ("grpc", "http"):
        if api in ttft_ms:
            name = f"gateway over {api}: tokenize, convert, write"
            lines.append(f"{name:<46}{ttft_ms[api] - direct:>8.2f}{ttft_ms[api]:>8.2f}")
    return lines
