"""Hints about sessions reach the scheduler from every API; what is none counts as not told."""

import asyncio
import json
from typing import Any

import pytest

from gateway.http.session_hints import DEFAULT_TTL_S, MOST_TTL_S, read_session, seconds_of
from gateway.request.client_session import ClientSession, name_of
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2
from tests.gateway.http_calls import post
from tests.pace import patience

TURN = {"role": "user", "content": "Hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"max_tokens": 5, "messages": [TURN]},
    "/v2/chat": {"messages": [TURN]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


def breakpoints(*controls: Any) -> list[dict[str, Any]]:
    """A turn with a text part for each control; None: one without."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"} for _ in controls]
    for part, control in zip(parts, controls, strict=True):
        if control is not None:
            part["cache_control"] = control
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"session_id": "a"}, ClientSession("a")),
        ({"session_id": 7, "parent_session_id": "p"}, ClientSession("7", "p")),
        ({"prompt_cache_key": "k"}, ClientSession(prefix_key="k")),
        ({"agent_hint": {"session_id": "a", "parent_session_id": "p"}}, ClientSession("a", "p")),
        ({"agent_hint": {"cache_control": {"ttl": "30s"}}}, ClientSession(ttl_s=30.0)),
        (
            {"agent_hint": {"session_id": "a", "context_management": {"edits": ["evict"]}}},
            ClientSession("a", ttl_s=0.0),
        ),
        (
            {"agent_hint": {"context_management": {"edits": [{"type": "evict"}]}}},
            ClientSession(ttl_s=0.0),
        ),
        ({"agent_hint": {"context_management": {"edits": ["offload"]}}}, ClientSession()),
        ({"cache_control": {"type": "ephemeral"}}, ClientSession(ttl_s=300.0)),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, ClientSession(ttl_s=3600.0)),
        ({"messages": breakpoints({"ttl": "1h"}, {"ttl": "5m"})}, ClientSession(ttl_s=300.0)),
        ({"messages": breakpoints({"ttl": "1h"}, None)}, ClientSession(ttl_s=3600.0)),
        ({"messages": [{**TURN, "cache_control": {"ttl": "5m"}}]}, ClientSession(ttl_s=300.0)),
        ({"system": [{"text": "a", "cache_control": {"ttl": "1h"}}]}, ClientSession()),
        ({"prompt_cache_retention": "24h"}, ClientSession(ttl_s=86_400.0)),
        ({"prompt_cache_retention": "in_memory"}, ClientSession()),
        ({"prompt_cache_options": {"ttl": "30m"}}, ClientSession(ttl_s=1800.0)),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_each_form_is_read(body: dict[str, Any], told: ClientSession) -> None:
    assert read_session({}, body) == told


NESTED: Any = [
    [[]],
    {"a": {}},
    "",
    None,
    True,
    1e400,
    float("nan"),
    -1,
    "9" * 400,
    "\ud800",
    10**5000,
]


@pytest.mark.parametrize("junk", NESTED, ids=lambda value: type(value).__name__)
def test_what_is_no_hint_counts_as_not_told_or_as_a_name(junk: Any) -> None:
    names = ("session_id", "parent_session_id", "prompt_cache_key")
    found = read_session({}, dict.fromkeys(names, junk))
    for name in (found.session_id, found.parent_id, found.prefix_key):
        assert len(name.encode()) <= 64
    for body in (
        {"agent_hint": junk, "cache_control": junk, "messages": junk},
        {"agent_hint": dict.fromkeys((*names, "cache_control", "context_management"), junk)},
        {"agent_hint": {"cache_control": {"ttl": junk}, "context_management": {"edits": junk}}},
        {"messages": [junk, {"content": junk}, {"content": [junk]}, {"cache_control": junk}]},
        {"cache_control": {"ttl": junk if junk is not None else "never"}},
        {"prompt_cache_options": junk, "prompt_cache_retention": junk},
    ):
        most = {dict: DEFAULT_TTL_S, int: MOST_TTL_S}.get(type(junk))
        assert read_session({}, body).ttl_s in (None, most)


def test_a_header_goes_before_the_body() -> None:
    headers = {"x-session-id": "of the header", "x-parent-session-id": "p"}
    told = read_session(headers, {"session_id": "of the body", "parent_session_id": "q"})
    assert told == ClientSession("of the header", "p")


def test_long_names_are_told_apart_and_short() -> None:
    long = ["ä" * 33, "ä" * 34, "x" * 10_000]
    names = [name_of(one) for one in long]
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 64 for name in names)
    assert name_of("x" * 64) == "x" * 64


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("5m", 300.0),
        ("1h", 3600.0),
        ("500ms", 0.5),
        ("2 d", 172800.0),
        (30, 30.0),
        ("0", 0.0),
        ("99999d", MOST_TTL_S),
        (1e300, MOST_TTL_S),
        ("1e3s", None),
        ("-5m", None),
        ("5 weeks", None),
    ],
)
def test_durations(told: Any, seconds: float | None) -> None:
    assert seconds_of(told) == seconds


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", BODIES)
async def test_hints_reach_the_scheduler(route: str, running: Any) -> None:
    if route == "/inference/v1/generate":
        hints: dict[str, Any] = {}
        headers = {"x-session-id": "a", "x-parent-session-id": "b"}
    else:
        hints = {"session_id": "a", "parent_session_id": "b", "prompt_cache_key": "k"}
        headers = {}
    answered = await running.http.post(route, json=BODIES[route] | hints, headers=headers)
    assert answered.status_code == 200, answered.text
    session = running.scheduler.submits[-1].session
    assert (session.session_id, session.parent_session_id) == ("a", "b")
    assert session.prefix_key == hints.get("prompt_cache_key", "")
    assert not session.HasField("ttl_s")
    await post(running, route, BODIES[route])
    assert not running.scheduler.submits[-1].HasField("session")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_breakpoint_of_anthropics_api_is_a_time(running: Any) -> None:
    body = {"max_tokens": 5, "messages": breakpoints({"type": "ephemeral", "ttl": "1h"})}
    await post(running, "/v1/messages", body)
    assert running.scheduler.submits[-1].session.ttl_s == 3600.0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_rounds_of_a_beam_search_are_no_turns(running: Any) -> None:
    body = {"prompt": "Hello", "use_beam_search": True, "n": 2, "max_tokens": 2, "session_id": "a"}
    running.scheduler.submits.clear()
    await running.http.post("/v1/completions", json=body)
    assert running.scheduler.submits
    assert not any(submit.HasField("session") for submit in running.scheduler.submits)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grpc_call_carries_a_session(running: Any) -> None:
    session = types_pb2.SessionHint(session_id="x" * 99, ttl_s=-1.0, prefix_key="k")
    options = pb.GenerationOptions(session=session)
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    told = running.scheduler.submits[-1].session
    assert (told.session_id, told.prefix_key) == (name_of("x" * 99), "k")
    assert not told.HasField("ttl_s")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("session_id", ["a", "x" * 99])
async def test_a_client_ends_its_session(session_id: str, running: Any) -> None:
    running.scheduler.ended_sessions.clear()
    await post(running, "/close_session", {"session_id": session_id, "cache_salt": "red"})
    async with asyncio.timeout(patience(5)):
        while not running.scheduler.ended_sessions:
            await asyncio.sleep(0.01)
    (ended,) = running.scheduler.ended_sessions
    assert (ended.session_id, ended.cache_salt) == (name_of(session_id), "red")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("body", [{}, {"session_id": 5}, {"session_id": None}])
async def test_an_end_without_a_name_is_refused(body: dict[str, Any], running: Any) -> None:
    answered = await running.http.post("/close_session", json=body)
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == "session_id"
