"""Responses in the background: looked at, followed, cancelled, bounded, and each caller's own."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.stored.background import BackgroundResponse, BackgroundResponses
from tests.gateway.http_calls import error_of, post, refusal
from tests.pace import patience
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/responses"
BODY = {"input": "x", "background": True}


async def ended(running: Any, name: str) -> dict[str, Any]:
    """The response once it has ended."""
    async with asyncio.timeout(patience(10)):
        while True:
            body: dict[str, Any] = (await running.http.get(f"{ROUTE}/{name}")).json()
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.01)


async def test_it_is_in_progress_at_once_and_complete_in_the_end(
    storing: Any, client: openai.AsyncOpenAI, eventually: Any
) -> None:
    storing.scheduler.hangs_after = 1
    begun = await client.responses.create(model="tiny", input="x", background=True)
    assert (begun.status, begun.output, begun.background) == ("in_progress", [], True)
    assert (await client.responses.retrieve(begun.id)).status == "in_progress"
    await eventually(lambda: bool(storing.scheduler.submits), "it is submitted")
    storing.scheduler.finish_hanging()
    body = await ended(storing, begun.id)
    assert body["status"] == "completed" and body["usage"]["output_tokens"] > 0
    listed = await client.responses.input_items.list(begun.id)
    assert len(listed.data) == 1


async def test_it_is_cancelled_with_what_it_had(storing: Any, eventually: Any) -> None:
    storing.scheduler.hangs_after = 1
    name = (await post(storing, ROUTE, BODY))["id"]
    await eventually(lambda: bool(storing.scheduler.submits), "it is submitted")
    for _ in range(2):  # the second time changes nothing
        body = await post(storing, f"{ROUTE}/{name}/cancel", {})
        assert body["status"] == "cancelled"
    await eventually(lambda: bool(storing.scheduler.aborted), "the scheduler is told")
    assert (await ended(storing, name))["status"] == "cancelled"


async def test_only_responses_of_the_background_are_cancelled(storing: Any) -> None:
    name = (await post(storing, ROUTE, {"input": "x"}))["id"]
    error_of(await storing.http.post(f"{ROUTE}/{name}/cancel"), 400)
    error_of(await storing.http.post(f"{ROUTE}/resp_unknown/cancel"), 404)


async def test_a_client_that_leaves_and_comes_back_has_every_event_once(storing: Any) -> None:
    whole = await events_of(storing, "POST", ROUTE, {"input": "x", "stream": True})
    body = BODY | {"stream": True}
    first: list[dict[str, Any]] = []
    storing.scheduler.hangs_after = 1
    async with storing.http.stream("POST", ROUTE, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                first.append(json.loads(line.removeprefix("data: ")))
            if len(first) == 3:
                break
    name = first[0]["response"]["id"]
    storing.scheduler.finish_hanging()
    await ended(storing, name)
    after = {"stream": "true", "starting_after": str(first[-1]["sequence_number"])}
    rest = await events_of(storing, "GET", f"{ROUTE}/{name}", params=after)
    numbers = [event["sequence_number"] for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert [e["type"] for e in (*first, *rest)][-1] == whole[-1]["type"] == "response.completed"
    again = await events_of(storing, "GET", f"{ROUTE}/{name}", params={"stream": "true"})
    assert again == [*first, *rest] or len(again) == len(numbers)


async def events_of(
    running: Any, method: str, path: str, body: Any = None, params: Any = None
) -> list[dict[str, Any]]:
    response = await running.http.request(method, path, json=body, params=params)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_failure_is_told_in_the_response(storing: Any) -> None:
    storing.scheduler.refuse(grpc.StatusCode.INTERNAL, "a row failed")
    name = (await post(storing, ROUTE, BODY))["id"]
    body = await ended(storing, name)
    assert body["status"] == "failed"
    assert body["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": False}, "background"),
        ({"temperature": 9}, "temperature"),
        ({"input": "Hello " * 400}, "messages"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 7}}}, None),
    ],
)
async def test_what_is_wrong_is_told_at_once(
    storing: Any, fields: dict[str, Any], param: str | None
) -> None:
    status, named, _ = await refusal(storing, ROUTE, BODY | fields)
    assert status == 400 and (param is None or named == param)
    assert not storing.scheduler.submits


async def test_without_a_store_it_is_refused(running: Any) -> None:
    status, named, message = await refusal(running, ROUTE, BODY)
    assert (status, named) == (400, "background") and "--store-responses" in message


async def test_a_key_sees_and_cancels_none_of_another(start: Any, tmp_path: Path) -> None:
    made = [new_key(name, "acme", [Role.USER]) for name in ("alice", "bob")]
    (tmp_path / "keys").write_text("\n".join(entry.line() for _, entry in made))
    running = await start(store_responses=1, identity=IdentityOptions(api_keys=tmp_path / "keys"))
    running.scheduler.hangs_after = 1
    alice, bob = ({"authorization": f"Bearer {key}"} for key, _ in made)
    name = (await running.http.post(ROUTE, json=BODY, headers=alice)).json()["id"]
    error_of(await running.http.get(f"{ROUTE}/{name}", headers=bob), 404)
    stream = {"stream": "true"}
    error_of(await running.http.get(f"{ROUTE}/{name}", params=stream, headers=bob), 404)
    error_of(await running.http.post(f"{ROUTE}/{name}/cancel", headers=bob), 404)
    error_of(await running.http.delete(f"{ROUTE}/{name}", headers=bob), 404)
    response = await running.http.delete(f"{ROUTE}/{name}", headers=alice)
    assert response.json()["deleted"] is True
    error_of(await running.http.get(f"{ROUTE}/{name}", headers=alice), 404)


# --- the registry alone -------------------------------------------------------------------------


async def forever() -> AsyncGenerator[bytes, None]:
    yield b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n"
    await asyncio.Event().wait()


def begin(
    registry: BackgroundResponses, owner: str, name: str, cancel: Callable[[], bytes] = bytes
) -> BackgroundResponse:
    return registry.start(owner, {"id": name}, forever(), cancel)


async def test_callers_are_bounded_each_and_together() -> None:
    registry = BackgroundResponses(max_running=3, max_of_owner=2)
    begun = [begin(registry, "a", "1"), begin(registry, "a", "2")]
    for owner in ("a", "a"):
        with pytest.raises(RequestError) as caught:
            begin(registry, owner, "3")
        assert caught.value.kind is ErrorKind.OVERLOADED
    begun.append(begin(registry, "b", "3"))
    with pytest.raises(RequestError):
        begin(registry, "c", "4")
    await registry.cancel(begun.pop())
    begun.append(begin(registry, "c", "4"))
    for response in begun:
        await registry.cancel(response)


async def test_the_events_of_ended_responses_are_bounded() -> None:
    registry = BackgroundResponses(max_bytes=100)
    for number in range(9):
        response = begin(registry, "a", str(number), lambda: b"x" * 40 + b"\n\n")
        await registry.cancel(response)
    kept = [number for number in range(9) if registry.find("a", str(number))]
    assert kept == [7, 8]


async def test_a_follower_hears_what_comes_while_it_follows() -> None:
    registry = BackgroundResponses()
    response = begin(registry, "a", "1", lambda: b"event: c\ndata: 3\n\n")
    heard = []
    async for event in response.follow(0):
        heard.append(event)
        await registry.cancel(response)
    assert heard == [b"event: b\ndata: 2\n\n", b"event: c\ndata: 3\n\n"]
