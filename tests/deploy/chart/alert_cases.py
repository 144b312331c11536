"""For each alert, series with which it fires, what it then says, and series with which it does not.

Series are in promtool's notation, a sample a minute; labels of the release are added.
"""

from dataclasses import dataclass, field

NAMES = 'namespace="llm",pagewire_release="demo-pagewire"'
Series = dict[str, str]


@dataclass(frozen=True, slots=True)
class AlertCase:
    """One alert: what makes it fire after `at`, and what looks alike and must not."""

    fires: Series
    quiet: Series
    summary: str
    at: str = "20m"
    labels: dict[str, str] = field(default_factory=dict)


def histogram(name: str, slow_per_minute: int) -> Series:
    """A histogram of a hundred observations a minute, of which some are slow."""
    fast = 100 - slow_per_minute
    return {
        f'{name}_bucket{{le="0.1"}}': f"0+{fast}x60",
        f'{name}_bucket{{le="10"}}': "0+100x60",
        f'{name}_bucket{{le="+Inf"}}': "0+100x60",
    }


REQUESTS = "pagewire_gateway_requests_total"
IDLE, BUSY = (
    "pagewire_worker_device_idle_seconds_total",
    "pagewire_worker_device_busy_seconds_total",
)
WAITING, SLOTS = "pagewire_scheduler_requests_waiting", "pagewire_scheduler_slots"
READY = 'pagewire_scheduler_worker_ready{worker="10.0.0.1:50053"}'
LOSSES = 'pagewire_scheduler_worker_losses_total{worker="10.0.0.1:50053"}'
WORKER = {"worker": "10.0.0.1:50053"}

CASES = {
    "PagewireNoScheduler": AlertCase(
        {'up{pagewire_tier="scheduler"}': "0x60", 'up{pagewire_tier="gateway"}': "1x60"},
        {'up{pagewire_tier="scheduler"}': "1x60"},
        "No scheduler can be scraped; gateways cannot serve.",
    ),
    "PagewireNoGateway": AlertCase(
        {'pagewire_gateway_ready{pod="a"}': "0x60", 'pagewire_gateway_ready{pod="b"}': "0x60"},
        {'pagewire_gateway_ready{pod="a"}': "0x60", 'pagewire_gateway_ready{pod="b"}': "1x60"},
        "No gateway is ready; requests are refused.",
    ),
    "PagewireNoWorker": AlertCase(
        {READY: "0x60"}, {READY: "1x60"}, "No worker is attached; nothing is computed."
    ),
    "PagewireWorkerAway": AlertCase(
        {READY: "0x60", READY.replace("1:", "2:"): "1x60"},
        {READY: "0x14 1x60"},
        "Worker 10.0.0.1:50053 is known and not attached.",
        labels=WORKER,
    ),
    "PagewireWorkerLosses": AlertCase(
        {LOSSES: "0x5 1x5 2x5 3x5 4x50"},
        {LOSSES: "0x5 1x5 2x50"},
        "Worker 10.0.0.1:50053 was lost 3 times in half an hour.",
        at="20m",
        labels=WORKER,
    ),
    "PagewireSchedulerLosses": AlertCase(
        {"pagewire_gateway_scheduler_losses_total": "0x2 9x60", "pagewire_gateway_ready": "1x60"},
        {"pagewire_gateway_scheduler_losses_total": "0x2 1x60", "pagewire_gateway_ready": "1x60"},
        "Gateways lose the scheduler again and again.",
    ),
    "PagewireErrors": AlertCase(
        {REQUESTS + '{outcome="stop"}': "0+98x60", REQUESTS + '{outcome="unavailable"}': "0+2x60"},
        {REQUESTS + '{outcome="stop"}': "0+50x60", REQUESTS + '{outcome="cancelled"}': "0+50x60"},
        "2% of requests end with an error that is not the client's.",
    ),
    "PagewireRefusals": AlertCase(
        {'pagewire_scheduler_refusals_total{code="RESOURCE_EXHAUSTED"}': "0+1x60"},
        {'pagewire_scheduler_refusals_total{code="INVALID_ARGUMENT"}': "0+1x60"},
        "The queue is full; requests are refused with 429.",
    ),
    "PagewireQueue": AlertCase(
        {WAITING: "65x60", SLOTS: "64x60"},
        {WAITING: "64x60", SLOTS: "64x60"},
        "More requests wait than can run at once.",
    ),
    "PagewireFirstToken": AlertCase(
        histogram("pagewire_gateway_time_to_first_token_seconds", 20),
        histogram("pagewire_gateway_time_to_first_token_seconds", 2),
        "One request of twenty waits 7.525s or longer for its first token.",
    ),
    "PagewireTokenGap": AlertCase(
        histogram("pagewire_gateway_inter_token_latency_seconds", 20),
        histogram("pagewire_gateway_inter_token_latency_seconds", 2),
        "One gap between tokens of twenty takes 7.525s or longer.",
    ),
    "PagewireKvFull": AlertCase(
        {'pagewire_scheduler_kv_usage_ratio{worker="10.0.0.1:50053"}': "0.99x60"},
        {'pagewire_scheduler_kv_usage_ratio{worker="10.0.0.1:50053"}': "0.99x5 0.5 0.99x8 0.5x60"},
        "The KV cache of worker 10.0.0.1:50053 is full; requests are preempted or wait.",
        labels=WORKER,
    ),
    "PagewirePreemptions": AlertCase(
        {
            "pagewire_scheduler_preemptions_total": "0+20x60",
            "pagewire_scheduler_accepted_requests_total": "0+100x60",
        },
        {
            "pagewire_scheduler_preemptions_total": "0+5x60",
            "pagewire_scheduler_accepted_requests_total": "0+100x60",
        },
        "More than one request of ten loses its slot and is computed again.",
        at="30m",
    ),
    "PagewireFailedSteps": AlertCase(
        {'pagewire_worker_failed_steps_total{pod="w-0"}': "0x10 1x60"},
        {'pagewire_worker_failed_steps_total{pod="w-0"}': "7x60"},
        "Worker w-0 failed at a step.",
        labels={"pod": "w-0"},
    ),
    "PagewireWorkerIdle": AlertCase(
        {IDLE + '{kind="decode"}': "0+30x60", BUSY + '{kind="decode"}': "0+30x60", WAITING: "1x60"},
        {IDLE + '{kind="decode"}': "0+30x60", BUSY + '{kind="decode"}': "0+30x60", WAITING: "0x60"},
        "Requests wait, and devices stand idle 50% of the time between decode steps.",
        at="40m",
    ),
    "PagewireOpenFiles": AlertCase(
        {
            'process_open_fds{pod="g-1",pagewire_tier="gateway"}': "900x60",
            'process_max_fds{pod="g-1",pagewire_tier="gateway"}': "1024x60",
        },
        {
            'process_open_fds{pod="g-1",pagewire_tier="gateway"}': "500x60",
            'process_max_fds{pod="g-1",pagewire_tier="gateway"}': "1024x60",
        },
        "Pod g-1 has nearly as many files and connections open as it may.",
        labels={"pod": "g-1"},
    ),
}
