"""The scheduler's messages as events of the live stream, which docs/page.md describes."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from json import JSONEncoder
from typing import Any

from pagewire.v1 import live_pb2, scheduler_pb2
from wire.columns import INT32, UINT8, UINT32, unpack

PHASES: dict[int, str] = {
    live_pb2.LIVE_PHASE_QUEUE: "q",
    live_pb2.LIVE_PHASE_GRAMMAR: "g",
    live_pb2.LIVE_PHASE_PREFILL: "p",
    live_pb2.LIVE_PHASE_DECODE: "d",
    live_pb2.LIVE_PHASE_PREEMPTED: "e",
    live_pb2.LIVE_PHASE_WORKER_AWAY: "w",
    live_pb2.LIVE_PHASE_KV: "k",
}
UNKNOWN_PHASE = "?"  # of a newer scheduler
_LETTERS = bytes(ord(PHASES.get(value, UNKNOWN_PHASE)) for value in range(256))
_TOTALS = (
    *("num_running", "num_waiting", "num_accepted", "num_finished", "num_overloaded"),
    *("num_output_tokens", "num_prefill_tokens", "prefix_query_tokens", "prefix_hit_tokens"),
    *("num_preemptions", "num_evictions", "num_steps"),
)

# ASCII: raw U+2028 and others end a line for some readers of event streams.
_encode = JSONEncoder(separators=(",", ":")).encode

Fact = Sequence[str | int | float | None]


def event(name: str, payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {_encode(payload)}\n\n".encode()


def frame_body(message: live_pb2.WatchResponse) -> dict[str, Any]:
    """The present state of all groups, as a message. Raises BadColumn."""
    status = message.status
    sessions = {"sessions": _sessions(status)} if message.tells_sessions else {}
    activities = {activity.address: activity for activity in message.groups}
    return {
        "time_s": round(status.uptime_s, 3),
        "ready": status.ready,
        "reason": status.reason,
        "max_num_seqs": status.max_num_seqs,
        "block_size": status.block_size,
        "totals": {name: getattr(status, name) for name in _TOTALS},
        "groups": [_group(group, activities.get(group.address)) for group in status.groups],
        **sessions,
    }


def _sessions(status: scheduler_pb2.GetStatusResponse) -> list[Fact]:
    return [
        (
            *(one.worker_address, one.session_id, one.tenant, one.state, one.num_turns),
            *(one.num_cached_tokens, round(one.idle_s, 1)),
            *(one.num_prompt_tokens, one.num_found_tokens),
        )
        for one in status.sessions
    ]


def _group(
    group: scheduler_pb2.WorkerGroupStatus, activity: live_pb2.GroupActivity | None
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "address": group.address,
        "ready": group.ready,
        "reason": group.reason,
        "epoch": group.epoch,
        "num_losses": group.num_losses,
        "why_lost": group.why_lost,
        "device": group.device,
        "kv_cache_dtype": group.kv_cache_dtype,
        "num_running": group.num_running,
        "num_waiting": group.num_waiting,
        "num_blocks": group.num_blocks,
        "num_free_blocks": group.num_free_blocks,
    }
    if activity is None:  # no worker has been there
        return body
    blocks = activity.blocks
    return body | {
        "blocks": {
            "num_blocks": blocks.num_blocks,
            "blocks_per_cell": blocks.blocks_per_cell,
            "cells": b64encode(blocks.cells).decode(),
        },
        "requests": _requests(activity.requests),
        "steps": [
            [
                *(bar.step_id, bar.num_steps, bar.num_prefill_tokens, bar.num_decode_tokens),
                *(bar.num_rows, bar.duration_us),
            ]
            for bar in activity.steps
        ],
    }


def _requests(rows: live_pb2.LiveRequests) -> dict[str, Any]:
    phases = unpack(rows.phases, UINT8, name="phases").tobytes()
    return {
        "total": rows.total,
        "number": unpack(rows.numbers, UINT32, name="numbers").tolist(),
        "phase": phases.translate(_LETTERS).decode("ascii"),
        "tokens": unpack(rows.num_tokens, INT32, name="num_tokens").tolist(),
        "computed": unpack(rows.num_computed_tokens, INT32, name="num_computed").tolist(),
        "blocks": unpack(rows.num_blocks, INT32, name="num_blocks").tolist(),
    }


def facts_of(activity: live_pb2.GroupActivity, uptime_s: float) -> dict[int, Fact]:
    """By number: what does not change about the requests that are new in a message."""
    return {
        fact.number: (
            fact.number,
            fact.request_id,
            fact.tenant,
            fact.num_prompt_tokens,
            fact.num_cached_tokens if fact.HasField("num_cached_tokens") else None,
            round(uptime_s - fact.age_s, 3),
        )
        for fact in activity.requests.facts
    }


class RequestFacts:
    """The facts of all live requests, for viewers who come late."""

    def __init__(self) -> None:
        self._by_group: dict[str, dict[int, Fact]] = {}

    def forget(self) -> None:
        """The next scheduler gives its own numbers."""
        self._by_group.clear()

    def take(self, message: live_pb2.WatchResponse) -> bytes:
        """Keeps what is new in a message; returns its event, empty if nothing is new."""
        told: dict[str, list[Fact]] = {}
        for activity in message.groups:
            known = self._by_group.setdefault(activity.address, {})
            new = facts_of(activity, message.status.uptime_s)
            known.update(new)
            if new:
                told[activity.address] = [*new.values()]
            self._prune(activity, known)
        return event("facts", {"all": False, "groups": told}) if told else b""

    def _prune(self, activity: live_pb2.GroupActivity, known: dict[int, Fact]) -> None:
        shown = unpack(activity.requests.numbers, UINT32, name="numbers")
        if len(known) > 2 * max(len(shown), 64):
            kept = {number: known[number] for number in shown.tolist() if number in known}
            self._by_group[activity.address] = kept

    def everything(self) -> bytes:
        """The event for a viewer who knows nothing."""
        groups = {address: [*known.values()] for address, known in self._by_group.items()}
        return event("facts", {"all": True, "groups": groups})
