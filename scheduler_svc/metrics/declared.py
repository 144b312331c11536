"""The scheduler's own numbers and, under vLLM's names, those that only it knows."""

from collections.abc import Callable

import grpc

from scheduler_svc.core import FinishReason
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step.draft import Counters
from wire.metrics.declared import SECONDS, TOKENS, counter, histogram

# A step of a small model on a GPU takes half a millisecond, one of a full prompt on a CPU minutes.
STEP_SECONDS = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(bound for bound in SECONDS if bound >= 0.01),
)
DECODE, PREFILL, MIXED, RELEASE = "decode", "prefill", "mixed", "release"
STEP_KINDS = (DECODE, PREFILL, MIXED, RELEASE)


def outcome_of(reason: FinishReason) -> str:
    """A finish reason as a label."""
    return reason.value.replace(" ", "_")


def phase_label(phase: Phase) -> str:
    """A phase as a label."""
    return phase.value.replace(" ", "_")


OUTCOMES = tuple(map(outcome_of, FinishReason))
CODES = tuple(code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK)

_P = "pagewire_scheduler_"
REQUESTS, REFUSALS = _P + "requests_total", _P + "refusals_total"
E2E, PHASES = _P + "request_seconds", _P + "request_phase_seconds"
STEPS, STEP_TOKENS = _P + "step_seconds", _P + "step_tokens_total"
STEP_SIZES = _P + "step_size_tokens"
GRANTS, GRANTED_STEPS = _P + "grants_total", _P + "granted_steps_total"
CUTS, SKIPPED_STEPS = _P + "cuts_total", _P + "skipped_steps_total"
TENANT_REQUESTS = _P + "tenant_requests_total"
TENANT_PROMPT_TOKENS = _P + "tenant_prompt_tokens_total"
TENANT_OUTPUT_TOKENS = _P + "tenant_output_tokens_total"

OWN = (
    counter(REQUESTS, "Requests that ended, by reason.", "outcome", OUTCOMES),
    counter(REFUSALS, "Requests that were not accepted, by status.", "code", CODES, is_sparse=True),
    histogram(E2E, "Seconds from a request's arrival here to its end."),
    histogram(
        PHASES,
        "Seconds that a request which ended had spent in a phase, if it was in it.",
        "phase",
        tuple(map(phase_label, Phase)),
        is_sparse=True,  # most requests are in three of the seven
    ),
    histogram(
        STEPS,
        "Seconds from sending a step, or from the end of the one before, to its result.",
        "kind",
        STEP_KINDS,
        STEP_SECONDS,
        is_sparse=True,
    ),
    counter(STEP_TOKENS, "Tokens that steps computed.", "kind", STEP_KINDS),
    histogram(STEP_SIZES, "Tokens of a step that computed any.", bounds=TOKENS),
    counter(GRANTS, "Frames that granted several decode steps at once."),
    counter(GRANTED_STEPS, "Steps in these."),
    counter(CUTS, "Grants that were to be cut short, since something had changed."),
    counter(SKIPPED_STEPS, "Granted steps that were taken back."),
)


VLLM_DRAFTS: tuple[tuple[str, str, Callable[[Counters], int]], ...] = (
    ("vllm:spec_decode_num_drafts_total", "Drafts verified.", lambda c: c.num_drafts),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "Tokens in them.",
        lambda c: c.num_drafted_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_total",
        "Of these, tokens that came true.",
        lambda c: c.num_accepted_tokens,
    ),
)
