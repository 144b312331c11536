"""--store-responses over HTTP and through the openai package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.process.config import GatewayConfig
from tests.gateway.http_calls import error_of, post, refusal
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/responses"


async def test_a_response_is_read_continued_and_deleted(
    client: openai.AsyncOpenAI, storing: Any, tokenizer: Any
) -> None:
    first = await client.responses.create(model="tiny", input="One", instructions="Be brief.")
    assert await client.responses.retrieve(first.id) == first
    second = await client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = tokenizer.decode(storing.scheduler.prompt_of(-1), skip_special_tokens=False)
    said = ["user\nOne", "assistant\nHello world", "user\nTwo"]
    turns = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in said)
    assert prompt.startswith(turns)  # the instructions were for the first one alone
    items = await client.responses.input_items.list(second.id)
    (item,) = items.data
    assert (item.type, item.content[0].text) == ("message", "Two")  # type: ignore[union-attr]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="tiny", input="x", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"


async def test_an_item_that_could_not_be_read_back_is_refused(storing: Any) -> None:
    """JSON may hold half a character, and text may not."""
    item = {"type": "function_call_output", "call_id": "\ud83d", "output": "a"}
    headers = {"content-type": "application/json"}
    for body, status in (({"input": [item]}, 400), ({"input": [item], "store": False}, 200)):
        response = await storing.http.post(ROUTE, content=json.dumps(body), headers=headers)
        assert response.status_code == status, response.text
        assert status == 200 or response.json()["error"]["param"] == "input[0]"


async def test_a_streamed_response_is_stored_at_its_end(
    client: openai.AsyncOpenAI, storing: Any
) -> None:
    events = [
        event
        async for event in await client.responses.create(model="tiny", input="One", stream=True)
    ]
    last: Any = events[-1]
    assert await client.responses.retrieve(last.response.id) == last.response


async def test_store_false_keeps_nothing(storing: Any) -> None:
    answer = await post(storing, ROUTE, {"input": "One", "store": False})
    assert answer["store"] is False
    error_of(await storing.http.get(f"{ROUTE}/{answer['id']}"), 404)


async def test_the_id_of_a_stored_response_is_not_the_callers_choice(storing: Any) -> None:
    response = await storing.http.post(ROUTE, json={"input": "x"}, headers={"x-request-id": "mine"})
    assert response.json()["id"].startswith("resp_")
    assert storing.scheduler.submits[-1].request_id == "mine"


async def test_a_response_that_has_no_room_says_that_it_is_not_stored(storing: Any) -> None:
    wide = {"a": "x" * (1 << 20)}
    answer = await post(storing, ROUTE, {"input": "One", "metadata": wide})
    assert answer["store"] is False
    assert (await post(storing, ROUTE, {"input": "One"}))["store"] is True


async def test_a_response_that_its_client_left_is_not_stored(
    storing: Any, eventually: Callable[..., Any]
) -> None:
    storing.scheduler.hangs_after = 1
    body = {"input": "x", "stream": True}
    async with storing.http.stream("POST", ROUTE, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                created = json.loads(line.removeprefix("data: "))["response"]["id"]
                break
    await eventually(lambda: bool(storing.scheduler.aborted), "the request is aborted")
    error_of(await storing.http.get(f"{ROUTE}/{created}"), 404)


async def test_items_are_listed_in_pages(storing: Any) -> None:
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    answer = await post(storing, ROUTE, {"input": items})
    path = f"{ROUTE}/{answer['id']}/input_items"
    whole = (await storing.http.get(path, params={"order": "asc"})).json()
    texts = [item["content"][0]["text"] for item in whole["data"]]
    assert texts == ["0", "1", "2", "3", "4"]
    assert whole["has_more"] is False
    page = (await storing.http.get(path, params={"limit": 2, "after": whole["last_id"]})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["3", "2"]
    assert page["has_more"] is True
    for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        (name,) = params
        error = error_of(await storing.http.get(path, params=params), 400)
        assert error["param"] == name


async def test_a_key_reads_no_responses_of_another(start: Any, tmp_path: Path) -> None:
    made = [new_key(name, "acme", [Role.USER]) for name in ("alice", "bob")]
    (tmp_path / "keys").write_text("\n".join(entry.line() for _, entry in made))
    identity = IdentityOptions(api_keys=tmp_path / "keys")
    running = await start(store_responses=1, identity=identity)
    alice, bob = ({"authorization": f"Bearer {key}"} for key, _ in made)
    response = await running.http.post(ROUTE, json={"input": "x"}, headers=alice)
    stored = response.json()["id"]
    path = f"{ROUTE}/{stored}"
    for url in (path, f"{path}/input_items"):
        error_of(await running.http.get(url, headers=bob), 404)
        error_of(await running.http.get(url), 401)
    error_of(await running.http.delete(path, headers=bob), 404)
    body = {"input": "y", "previous_response_id": stored}
    error_of(await running.http.post(ROUTE, json=body, headers=bob), 404)
    assert (await running.http.post(ROUTE, json=body, headers=alice)).status_code == 200
    assert (await running.http.delete(path, headers=alice)).json()["deleted"] is True


async def test_without_the_option_both_fields_are_refused(running: Any) -> None:
    for field, value in (("store", True), ("previous_response_id", "resp_1")):
        status, param, message = await refusal(running, ROUTE, {"input": "x", field: value})
        assert (status, param) == (400, field)
        assert "--store-responses" in message
    assert (await post(running, ROUTE, {"input": "x"}))["store"] is False
    for method in ("GET", "DELETE"):
        response = await running.http.request(method, f"{ROUTE}/resp_1")
        assert "--store-responses" in error_of(response, 404)["message"]


def config(model_folder: Path, **options: Any) -> GatewayConfig:
    return GatewayConfig(model=model_folder, scheduler="localhost:1", **options)


async def test_several_processes_cannot_store(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^--store-responses: .*--processes 1"):
        config(model_folder, store_responses=5, processes=2)
    with pytest.raises(ValueError, match=r"^--store-responses: -1 is outside"):
        config(model_folder, store_responses=-1)


async def test_what_continues_a_response_is_of_the_session_of_the_first(storing: Any) -> None:
    first = await post(storing, "/v1/responses", {"input": "Hello"})
    second = await post(
        storing, "/v1/responses", {"input": "Go on", "previous_response_id": first["id"]}
    )
    await post(storing, "/v1/responses", {"input": "On", "previous_response_id": second["id"]})
    named = {"input": "On", "previous_response_id": second["id"], "session_id": "a"}
    await post(storing, "/v1/responses", named)
    told = [submit.session.session_id for submit in storing.scheduler.submits[-4:]]
    assert told == [first["id"]] * 3 + ["a"]
