"""Items of earlier answers that clients name by their ids, as the AI SDK's default model does."""

from pathlib import Path
from typing import Any

import pytest

from gateway.http.stored.recent import OVERHEAD_BYTES, RecentItems
from tests.gateway.http_calls import post, refusal
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/responses"
USER = {"role": "user", "content": "Hello"}
CALL = '<think>\nHm.\n</think>\n\nI look.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "f"}]


def reference(item: dict[str, Any], *, typed: bool = True) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]} if typed else {"id": item["id"]}


def item(name: str, size: int = 0) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "content": "x" * size}


@pytest.mark.parametrize("options", [{}, {"store_responses": 1}], ids=["recent", "stored"])
@pytest.mark.parametrize("typed", [True, False])
async def test_references_are_what_the_items_are(
    options: dict[str, Any], typed: bool, start: Any, encode: Any
) -> None:
    running = await start(**options)
    running.scheduler.output = encode(CALL)
    first = await post(running, ROUTE, {"input": [USER], "tools": TOOLS})
    thought, said, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
    prompts = []
    for items in ([thought, said, call], [reference(i, typed=typed) for i in first["output"]]):
        await post(running, ROUTE, {"input": [USER, *items, result], "tools": TOOLS})
        prompts.append(running.scheduler.prompt_of(-1))
    assert prompts[0] == prompts[1]


async def test_a_stored_conversation_holds_the_items_and_no_references(start: Any) -> None:
    running = await start(store_responses=1)
    first = await post(running, ROUTE, {"input": [USER]})
    asked = {"input": [USER, reference(first["output"][0]), USER]}
    second = await post(running, ROUTE, asked)
    listed = (await running.http.get(f"{ROUTE}/{second['id']}/input_items")).json()["data"]
    assert [entry["type"] for entry in listed] == ["message"] * 3
    third = {"input": [USER], "previous_response_id": second["id"]}
    await post(running, ROUTE, third)
    await running.http.delete(f"{ROUTE}/{first['id']}")
    await post(running, ROUTE, third)


async def test_what_is_not_kept_says_how_to_do_without(running: Any) -> None:
    asked = {"input": [USER, {"type": "item_reference", "id": "msg_unknown"}]}
    status, param, message = await refusal(running, ROUTE, asked)
    assert (status, param) == (400, "input[1].type")
    assert "store: false" in message and "msg_unknown" in message


async def test_items_of_an_answer_that_is_not_to_be_stored_are_not_kept(running: Any) -> None:
    first = await post(running, ROUTE, {"input": [USER], "store": False})
    asked = {"input": [USER, reference(first["output"][0])]}
    assert (await refusal(running, ROUTE, asked))[0] == 400


async def test_a_key_finds_its_own_items_alone(start: Any, tmp_path: Path) -> None:
    made = [new_key(name, "acme", [Role.USER]) for name in ("alice", "bob")]
    (tmp_path / "keys").write_text("\n".join(entry.line() for _, entry in made))
    running = await start(identity=IdentityOptions(api_keys=tmp_path / "keys"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key, _ in made)
    answered = await running.http.post(ROUTE, json={"input": [USER]}, headers=alice)
    asked = {"input": [USER, reference(answered.json()["output"][0])]}
    for headers, status in ((bob, 400), (alice, 200)):
        assert (await running.http.post(ROUTE, json=asked, headers=headers)).status_code == status


async def test_the_bounds_hold_and_each_caller_makes_its_own_room() -> None:
    one = len(b'{"id":"a0","type":"message","role":"assistant","content":""}') + OVERHEAD_BYTES
    recent = RecentItems(max_bytes=20 * one, max_per_caller=5 * one)
    recent.put("", "small", [item("s0")])
    for number in range(100):
        for caller in "abc":
            recent.put("", caller, [item(f"{caller}{number % 10}{number}")])
        assert recent.num_bytes <= 20 * one
    assert recent.find("", "s0") is not None
    recent.put("", "large", [item("l0", 6 * one)])
    assert recent.find("", "l0") is None
    for number in range(100):  # many callers share what there is
        recent.put("", f"caller {number}", [item(f"i{number}")])
        assert recent.num_bytes <= 20 * one
    assert recent.find("", "i99") is not None


async def test_an_emptied_caller_leaves_nothing() -> None:
    recent = RecentItems(max_bytes=OVERHEAD_BYTES + 100, max_per_caller=OVERHEAD_BYTES + 100)
    for number in range(50):
        recent.put("", f"caller {number}", [item(f"i{number}")])
    assert len(recent._callers) == len(recent._bytes_of) == len(recent._items) == 1
