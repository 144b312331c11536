"""The gateway's own numbers and, under vLLM's names, those that its dashboards look for."""

from gateway.errors.request_errors import OVERLOADED_STATUS, WIRE
from gateway.request.generation import FinishReason
from wire.metrics.declared import (
    SECONDS,
    TOKENS,
    Declared,
    MetricKind,
    counter,
    gauge,
    histogram,
)

CANCELLED = "cancelled"  # its client left, or another output of its call failed
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
ERROR_CODES = tuple(wire.code for wire in WIRE.values())
OUTCOMES = tuple(dict.fromkeys((*FINISH_REASONS, CANCELLED, *ERROR_CODES)))
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/models",
    "/v1/live",
    "/inference/v1/generate",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/",
)
OTHER = "other"
_FAILED = (*(wire.http_status for wire in WIRE.values()), OVERLOADED_STATUS)
STATUSES = tuple(map(str, sorted({200, 405, 500, *_FAILED})))

_P = "pagewire_gateway_"
REQUESTS = _P + "requests_total"
RUNNING, WAITING = _P + "requests_running", _P + "requests_waiting"
PROMPT_TOKENS = _P + "prompt_tokens_total"
CACHED_TOKENS = _P + "cached_tokens_total"
OUTPUT_TOKENS = _P + "output_tokens_total"
REQUEST_PROMPT_TOKENS = _P + "request_prompt_tokens"
REQUEST_OUTPUT_TOKENS = _P + "request_output_tokens"
TTFT = _P + "time_to_first_token_seconds"
ITL = _P + "inter_token_latency_seconds"
TPOT = _P + "time_per_output_token_seconds"
E2E = _P + "request_seconds"
QUEUE, PREFILL = _P + "request_queue_seconds", _P + "request_prefill_seconds"
DECODE, INFERENCE = _P + "request_decode_seconds", _P + "request_inference_seconds"
LOSSES = _P + "scheduler_losses_total"
HTTP = _P + "http_responses_total"

OWN = (
    counter(
        REQUESTS,
        "Outputs that ended, by finish reason, or by the error's code.",
        "outcome",
        OUTCOMES,
    ),
    gauge(RUNNING, "Requests that a worker computes, as far as this gateway knows."),
    gauge(WAITING, "Requests accepted that have not been admitted by the scheduler."),
    counter(PROMPT_TOKENS, "Prompt tokens, as the usage of the answers counts them."),
    counter(CACHED_TOKENS, "Of these, tokens found in the prefix cache."),
    counter(OUTPUT_TOKENS, "Output tokens that were passed on."),
    histogram(REQUEST_PROMPT_TOKENS, "Prompt tokens of an output that ended.", bounds=TOKENS),
    histogram(REQUEST_OUTPUT_TOKENS, "Output tokens of an output that ended.", bounds=TOKENS),
    histogram(TTFT, "Seconds from a request's arrival to its first token."),
    histogram(ITL, "Seconds between two messages with tokens of an output."),
    histogram(TPOT, "Seconds per token after the first, once per output of two or more."),
    histogram(E2E, "Seconds from a request's arrival to its end, whatever that was."),
    histogram(QUEUE, "Seconds that an output waited for its first turn."),
    histogram(PREFILL, "Seconds from an output's first turn to its first token."),
    histogram(DECODE, "Seconds from an output's first token to its end."),
    histogram(INFERENCE, "Seconds from an output's first turn to its end."),
    counter(LOSSES, "Streams to the scheduler that broke."),
)
HTTP_RESPONSES = Declared(
    MetricKind.COUNTER,
    HTTP,
    "Answers over HTTP, counted when their head is written.",
    ("route", "code"),
    tuple((route, status) for route in (*ROUTES, OTHER) for status in (*STATUSES, OTHER)),
    is_sparse=True,
)

_MODEL = ("model_name",)


def _like(kind: MetricKind, name: str, text: str, *labels: str) -> Declared:
    bounds = SECONDS if kind is MetricKind.HISTOGRAM else ()
    return Declared(kind, f"vllm:{name}", text, (*_MODEL, *labels), bounds=bounds)


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
# Of what is counted above, by the name that vLLM gives it.
VLLM = {
    _like(_G, "num_requests_running", "Requests in the batch of a worker."): RUNNING,
    _like(_G, "num_requests_waiting", "Requests that wait to be admitted."): WAITING,
    _like(_C, "prompt_tokens_total", "Prompt tokens."): PROMPT_TOKENS,
    _like(_C, "generation_tokens_total", "Output tokens."): OUTPUT_TOKENS,
    _like(_C, "prefix_cache_queries_total", "Prompt tokens looked up."): PROMPT_TOKENS,
    _like(_C, "prefix_cache_hits_total", "Prompt tokens found."): CACHED_TOKENS,
    _like(_H, "request_prompt_tokens", "Prompt tokens of an output."): REQUEST_PROMPT_TOKENS,
    _like(_H, "request_generation_tokens", "Tokens of an output."): REQUEST_OUTPUT_TOKENS,
    _like(_H, "time_to_first_token_seconds", "Arrival to first token."): TTFT,
    _like(_H, "inter_token_latency_seconds", "Between tokens."): ITL,
    _like(_H, "time_per_output_token_seconds", "Between tokens, by vLLM's older name."): ITL,
    _like(_H, "request_time_per_output_token_seconds", "Per token, by output."): TPOT,
    _like(_H, "e2e_request_latency_seconds", "Arrival to end."): E2E,
    _like(_H, "request_queue_time_seconds", "Waited for its first turn."): QUEUE,
    _like(_H, "request_prefill_time_seconds", "First turn to first token."): PREFILL,
    _like(_H, "request_decode_time_seconds", "First token to end."): DECODE,
    _like(_H, "request_inference_time_seconds", "First turn to end."): INFERENCE,
}
VLLM_SUCCESS = _like(_C, "request_success_total", "Outputs that ended.", "finished_reason")
VLLM_KV_USAGE = _like(_G, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
VLLM_PREEMPTIONS = _like(_C, "num_preemptions_total", "Times that a request lost its slot.")
VLLM_ITERATIONS = Declared(
    _H, "vllm:iteration_tokens_total", "Tokens of a step that computed any.", _MODEL, bounds=TOKENS
)
VLLM_CACHE_CONFIG = Declared(
    _G,
    "vllm:cache_config_info",
    "Size of the KV cache.",
    (*_MODEL, "block_size", "num_gpu_blocks"),
)
