"""Reads the hints of clients of any API about their sessions, from a body and its headers.

All of it are hints, which change no answer: what cannot be read counts as not told.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from gateway.http.headers import standing_of
from gateway.http.messages import Strict
from gateway.pipeline.pipeline import Pipeline
from gateway.request.client_session import ClientSession, name_of

SESSION_ID, PARENT_SESSION_ID = "x-session-id", "x-parent-session-id"
DEFAULT_TTL_S = 300.0  # of Anthropic's breakpoints
MOST_TTL_S = 7 * 86_400.0
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|m|h|d)?")
_UNIT_S = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_EVICT = "evict"  # of agent_hint.context_management.edits


async def session_of(request: Request) -> ClientSession | None:
    """The session that a request tells of; None where it tells of none."""
    body = await request.json()  # parsed before
    found = read_session(request.headers, body if isinstance(body, dict) else {})
    return None if found == ClientSession() else found


def read_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> ClientSession:
    """The session in headers and a body: a header goes before fields, those before a hint."""
    hint = _object(body.get("agent_hint"))
    session = headers.get(SESSION_ID) or body.get("session_id") or hint.get("session_id")
    parent = (
        headers.get(PARENT_SESSION_ID)
        or body.get("parent_session_id")
        or hint.get("parent_session_id")
    )
    return ClientSession(
        session_id=name_of(session),
        parent_id=name_of(parent),
        ttl_s=_ttl_s(hint, body),
        prefix_key=name_of(body.get("prompt_cache_key")),
    )


def _ttl_s(hint: Mapping[str, Any], body: Mapping[str, Any]) -> float | None:
    """The first time that is told, from what is of this request alone to what is of many."""
    for edit in _list(_object(hint.get("context_management")).get("edits")):
        if _EVICT in (edit, _object(edit).get("type")):
            return 0.0
    told = (
        seconds_of(_object(hint.get("cache_control")).get("ttl")),
        _breakpoint_s(body.get("cache_control")),
        _last_breakpoint_s(body.get("messages")),
        seconds_of(_object(body.get("prompt_cache_options")).get("ttl")),
        seconds_of(body.get("prompt_cache_retention")),
    )
    return next((ttl_s for ttl_s in told if ttl_s is not None), None)


def _last_breakpoint_s(messages: Any) -> float | None:
    """The time at the last breakpoint of the turns; those of tools and system are others', too."""
    for message in reversed(_list(messages)):
        for part in reversed(_list(_object(message).get("content"))):
            ttl_s = _breakpoint_s(_object(part).get("cache_control"))
            if ttl_s is not None:
                return ttl_s
        ttl_s = _breakpoint_s(_object(message).get("cache_control"))
        if ttl_s is not None:
            return ttl_s
    return None


def _breakpoint_s(control: Any) -> float | None:
    if not isinstance(control, dict):
        return None
    told = control.get("ttl")
    return DEFAULT_TTL_S if told is None else seconds_of(told)


def seconds_of(told: Any) -> float | None:
    """A duration such as "5m", "1h" or 30 in seconds, at most a week; None for anything else."""
    if isinstance(told, bool):
        return None
    if isinstance(told, str):
        found = _DURATION.fullmatch(told)
        if found is None:
            return None
        told = float(found[1]) * _UNIT_S[found[2]]
    if not isinstance(told, int | float) or not 0 <= told < math.inf:
        return None
    return float(min(told, MOST_TTL_S))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class CloseSessionBody(Strict):
    """POST /close_session, as in SGLang's API."""

    session_id: str
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None


def add_session_routes(app: FastAPI, pipeline: Pipeline) -> None:
    """Adds the route by which a client says that a session has ended."""

    @app.post("/close_session")
    async def close_session(body: CloseSessionBody, request: Request) -> dict[str, str]:
        salt = standing_of(body, request.headers).scoped_salt(body.cache_salt or "")
        pipeline.link.end_session(name_of(body.session_id), salt)
        return {"session_id": body.session_id}
