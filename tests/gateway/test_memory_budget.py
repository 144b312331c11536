"""The budgets of all callers together fit the memory that the chart gives a pod."""

from pathlib import Path
from typing import Any

import yaml

from gateway.callers.text_turns import MIB, NUM_SHORT_THREADS, SHORT_BYTES
from gateway.edge.edge_limits import EdgeLimits
from gateway.errors import limits
from gateway.grpc_api.recent_calls import MAX_BYTES as MAX_RECENT_CALLS_BYTES
from gateway.process.config import GatewayConfig
from scheduler_svc.config import make_parser
from scheduler_svc.core.queue.intake import ROOM_OF_NEWCOMERS
from wire.forks.limits import MEMORY_MIB
from wire.grammar_check.checks import MAX_AT_ONCE, MAX_FULL_AT_ONCE
from wire.server import SERVER_OPTIONS

CHART = Path(__file__).parents[2] / "deploy/k8s/chart/values.yaml"
UNITS = {"Mi": MIB, "Gi": 1 << 30}
# Measured, and some to spare: a process before its first request has 150 MiB, a byte of text takes
# up to 369 while it is tokenized (digits, one token each), an open HTTP request 8 KiB.
GATEWAY_BYTES, SCHEDULER_BYTES = 180 * MIB, 150 * MIB
BYTES_PER_BYTE_OF_TEXT = 400
BYTES_PER_CONNECTION = 32 << 10
MODEL_LEN = 1 << 17  # of the models that the sum is made for
BYTES_PER_TOKEN = 4


def memory_of(tier: str) -> int:
    values: dict[str, Any] = yaml.safe_load(CHART.read_text())
    given = values[tier]["resources"]["limits"]["memory"]
    return int(given[:-2]) * UNITS[given[-2:]]


def gateway_parts() -> dict[str, int]:
    """Bytes of all that callers can make one gateway hold at once, by what it is."""
    edge = EdgeLimits()
    texts = edge.texts.max_text + NUM_SHORT_THREADS * SHORT_BYTES
    stored: int = GatewayConfig.__dataclass_fields__["store_responses"].default
    return {
        "the process": GATEWAY_BYTES,
        "bodies, and the texts in them that wait": edge.max_bodies_bytes,
        "texts that are tokenized": BYTES_PER_BYTE_OF_TEXT * texts,
        "grammars that are checked": (MAX_AT_ONCE + MAX_FULL_AT_ONCE) * MEMORY_MIB * MIB,
        "answers by idempotency key": MAX_RECENT_CALLS_BYTES,
        "stored responses": stored * MIB,
        "responses in the background": limits.MAX_BACKGROUND_BYTES,
        "items of recent responses": limits.MAX_RECENT_ITEM_BYTES,
        "idle streams": 2 * edge.max_connections * BYTES_PER_CONNECTION,
    }


def scheduler_parts() -> dict[str, int]:
    """The same of a scheduler with one worker group."""
    given = make_parser().parse_args([])
    most_waiting = ROOM_OF_NEWCOMERS * 2 * given.max_num_seqs
    longest = MODEL_LEN * BYTES_PER_TOKEN
    return {
        "the process": SCHEDULER_BYTES,
        "tokens that run": given.max_num_seqs * longest,
        "tokens that wait": most_waiting * longest,
        "a message that comes, and one that goes": 2 * _largest_message(),
    }


def _largest_message() -> int:
    return int(dict(SERVER_OPTIONS)["grpc.max_receive_message_length"])


def test_all_that_callers_can_make_a_gateway_hold_fits_its_pod() -> None:
    assert sum(gateway_parts().values()) <= memory_of("gateway"), gateway_parts()


def test_all_that_callers_can_make_a_scheduler_hold_fits_its_pod() -> None:
    assert sum(scheduler_parts().values()) <= memory_of("scheduler"), scheduler_parts()


def test_a_budget_of_one_client_is_a_part_of_the_budget_of_all() -> None:
    edge = EdgeLimits()
    for of_client, of_all in (
        (edge.max_bodies_bytes_per_client, edge.max_bodies_bytes),
        (edge.texts.max_per_client, edge.texts.max_total),
        (edge.max_slow_grammars_per_client, edge.max_slow_grammars),
        (edge.max_streams_per_client, edge.max_connections),
    ):
        assert 2 * of_client <= of_all
