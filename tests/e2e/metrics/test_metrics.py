"""Metrics of all three services, compared with what a client of theirs counted.

Counts are equal. Times are compared by order alone, which holds at any speed: what the gateway
measures begins after its client's clock and ends before it, and what the scheduler measures lies
within that again.
"""

import re
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.chart.rendering import tool
from tests.e2e.conftest import ROOT, Product
from tests.e2e.metrics.metrics_load import (
    Counted,
    Growth,
    LoadClient,
    Scrapes,
    leave_a_stream,
    read_metrics,
    run_together,
    urls_of,
)
from tests.pace import patience

PROMPT = "One shared beginning that is long enough to fill several blocks of the cache. " * 4
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES = [
    {"prompt": PROMPT + "a", "max_tokens": 12, "ignore_eos": True, **STREAM},
    {"prompt": PROMPT + "b", "max_tokens": 1, "ignore_eos": True, **STREAM},
    {"prompt": PROMPT + "c", "max_tokens": 7, "ignore_eos": True},
    {"prompt": PROMPT, "max_tokens": 9, "n": 3, "seed": 1, "temperature": 1.0, "ignore_eos": True},
    {"prompt": PROMPT, "max_tokens": 0, "echo": True},
    {"prompt": "word " * 20_000, "max_tokens": 1},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "model": "another"},
]
NUM_CLIENTS = 3
FINISHED = {"stop", "length"}
DOCUMENT = ROOT / "docs" / "observability.md"
NAME = re.compile(r"`((?:pagewire|vllm|grpc|process)[_:][a-z0-9_]+)`")
# Of a request, not of the model: they are in no text until there is a cause.
ONLY_BY_OPTION = {
    f"pagewire_scheduler_tenant_{what}_total"
    for what in ("requests", "prompt_tokens", "output_tokens")
} | {f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")}
# And of a model whose prompts may have pictures: tests/e2e/pictures/test_chats.py.
ONLY_BY_OPTION |= {"pagewire_worker_pictures_total", "pagewire_worker_picture_cache_bytes"}
# And of a worker with a disk tier: tests/e2e/test_disk_tier.py.
ONLY_BY_OPTION |= {"pagewire_worker_disk_tier_blocks", "pagewire_worker_disk_tier_write_off"}


@pytest.fixture(scope="module")
def load(tiny_product: Product) -> tuple[Counted, Growth]:
    """The script was run: what its clients counted, and what the metrics added meanwhile."""
    before = Scrapes(tiny_product)
    clients = [LoadClient(tiny_product) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.counted = clients[0].counted
    run_together(clients, BODIES)
    return clients[0].counted, Growth(before, Scrapes(tiny_product))


def test_requests_are_counted_as_the_client_counts_them(load: tuple[Counted, Growth]) -> None:
    counted, growth = load
    assert set(counted.reasons) <= FINISHED
    assert sum(counted.reasons.values()) == NUM_CLIENTS * 7
    for reason, count in counted.reasons.items():
        assert growth.of("pagewire_gateway_requests_total", outcome=reason) == count
        assert growth.of("vllm:request_success_total", finished_reason=reason) == count
        assert growth.of("pagewire_scheduler_requests_total", outcome=reason) == count
    for status, count in counted.codes.items():
        got = growth.of(
            "pagewire_gateway_http_responses_total", route="/v1/completions", code=str(status)
        )
        assert got == count, status
    assert counted.codes == {200: NUM_CLIENTS * 5, 400: NUM_CLIENTS * 2, 404: NUM_CLIENTS}
    outcome = "context_length_exceeded"
    assert growth.of("pagewire_gateway_requests_total", outcome=outcome) == NUM_CLIENTS


def test_tokens_are_counted_as_the_client_counts_them(load: tuple[Counted, Growth]) -> None:
    counted, growth = load
    assert counted.num_cached_tokens > 0
    for name, number in (
        ("pagewire_gateway_prompt_tokens_total", counted.num_prompt_tokens),
        ("vllm:prompt_tokens_total", counted.num_prompt_tokens),
        ("pagewire_gateway_cached_tokens_total", counted.num_cached_tokens),
        ("vllm:prefix_cache_hits_total", counted.num_cached_tokens),
        ("pagewire_gateway_output_tokens_total", counted.num_output_tokens),
        ("vllm:generation_tokens_total", counted.num_output_tokens),
        ("pagewire_scheduler_output_tokens_total", counted.num_output_tokens),
        ("pagewire_gateway_request_output_tokens_sum", counted.num_output_tokens),
    ):
        assert growth.of(name) == number, name


def test_times_lie_within_the_clients_and_around_the_schedulers(
    tiny_product: Product,
) -> None:
    before, client = Scrapes(tiny_product), LoadClient(tiny_product)
    for _ in range(4):
        client.send(**BODIES[0])
    growth = Growth(before, Scrapes(tiny_product))
    ttft_s = growth.of("pagewire_gateway_time_to_first_token_seconds_sum")
    itl_s = growth.of("pagewire_gateway_inter_token_latency_seconds_sum")
    e2e_s = growth.of("pagewire_gateway_request_seconds_sum")
    phases = [
        growth.of("pagewire_scheduler_request_phase_seconds_sum", phase=phase)
        for phase in ("queue", "prefill")
    ]
    assert 0 < sum(phases) <= ttft_s <= client.counted.ttft_s
    assert ttft_s + itl_s <= e2e_s <= client.counted.until_last_s
    assert growth.of("pagewire_gateway_time_to_first_token_seconds_count") == 4
    num_tokens, num_messages = (
        client.counted.num_output_tokens,
        4 + growth.of("pagewire_gateway_inter_token_latency_seconds_count"),
    )
    assert num_messages <= num_tokens
    queue_s, prefill_s, decode_s, inference_s = (
        growth.of(f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    )
    assert 0 < queue_s + prefill_s <= ttft_s and queue_s + inference_s <= e2e_s
    assert prefill_s + decode_s == pytest.approx(inference_s)
    assert growth.of("vllm:request_inference_time_seconds_count") == 4
    tpot_s = growth.of("pagewire_gateway_time_per_output_token_seconds_sum")
    assert tpot_s * (num_tokens // 4 - 1) == pytest.approx(itl_s)


def test_steps_are_counted_alike_where_they_are_planned_and_computed(
    tiny_product: Product, load: tuple[Counted, Growth]
) -> None:
    kinds = ("decode", "prefill", "mixed")  # a grant that was cut whole is a release to the worker

    def totals(service: str) -> list[float]:
        now = Scrapes(tiny_product)
        return [
            sum(now.sum(f"pagewire_{service}_{name}", kind=kind) for kind in kinds)
            for name in ("step_tokens_total", "step_seconds_count")
        ]

    deadline_s = time.monotonic() + patience(20)
    while (computed := totals("worker")) != (planned := totals("scheduler")):
        assert time.monotonic() < deadline_s, (computed, planned)  # the last steps have come by now
        time.sleep(0.05)
    assert min(computed) > 0
    assert Scrapes(tiny_product).sum("pagewire_worker_device_busy_seconds_total") > 0
    relayed = [f"vllm:iteration_tokens_total_{what}" for what in ("sum", "count")]
    while [sum_of(tiny_product, name) for name in relayed] != planned:  # a poll a second
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def sum_of(product: Product, name: str) -> float:
    return Scrapes(product).sum(name)


def test_a_client_that_leaves_is_an_outcome(tiny_product: Product) -> None:
    name, before = "pagewire_gateway_requests_total", Scrapes(tiny_product)
    leave_a_stream(tiny_product, **BODIES[0] | {"max_tokens": 2000})
    deadline_s = time.monotonic() + patience(20)
    while Growth(before, Scrapes(tiny_product)).of(name, outcome="cancelled") != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_promtool_finds_nothing_but_the_colons_of_vllms_names(
    tiny_product: Product, load: tuple[Counted, Growth], service: str
) -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=read_metrics(urls_of(tiny_product)[service]),
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    colon = re.compile(r"vllm:\w+:? metric names should not contain ':'")
    # A histogram of this name is vLLM's.
    total = re.compile(r'vllm:iteration_tokens_total:? non-counter .* "_total" suffix')
    found = (done.stdout + done.stderr).splitlines()
    assert [line for line in found if not (colon.fullmatch(line) or total.fullmatch(line))] == []


def documented_names() -> set[str]:
    return set(NAME.findall(DOCUMENT.read_text()))


def test_the_document_names_what_a_running_stack_exports_and_all_of_it(
    load: tuple[Counted, Growth],
) -> None:
    _, growth = load
    exported = set()
    for text in growth.after.texts.values():
        for family in text_string_to_metric_families(text):
            is_counter = family.type == "counter"
            exported.add(f"{family.name}_total" if is_counter else family.name)
    assert documented_names() - exported - ONLY_BY_OPTION == set()
    assert exported - documented_names() == set()
