"""The store of responses: its bound, its owners, and conversations that continue."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.stored.store import OVERHEAD_BYTES, ResponseStore


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "role": "assistant", "content": text}]}


def is_there(store: ResponseStore, owner: str, name: str) -> bool:
    try:
        return store.body(owner, name)["id"] == name
    except RequestError as error:
        assert error.kind is ErrorKind.NOT_FOUND
        return False


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 9_000), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 20_000),
)
def test_the_bound_holds_and_the_count_is_exact(
    steps: list[tuple[str, int, int, bool]], max_bytes: int
) -> None:
    store = ResponseStore(max_bytes)
    model: dict[tuple[str, str], int] = {}
    for number, (owner, pick, size, deletes) in enumerate(steps):
        if deletes and model:
            chosen = list(model)[pick % len(model)]
            if is_there(store, *chosen):
                store.delete(*chosen)
            del model[chosen]
        else:
            body = response(f"r{number}", "x" * size)
            num_bytes = len(json.dumps(body, separators=(",", ":"))) + 2 + OVERHEAD_BYTES
            assert store.put(owner, body, [], None) is (num_bytes <= max_bytes)
            model[owner, f"r{number}"] = num_bytes
        kept = sum(size for (who, name), size in model.items() if is_there(store, who, name))
        assert store.num_bytes == kept <= max_bytes


def test_none_reads_or_deletes_what_belongs_to_another() -> None:
    store = ResponseStore(1 << 20)
    store.put("a", response("r"), [], None)
    assert not is_there(store, "b", "r")
    for call in (store.delete, store.input_items, store.conversation):
        with pytest.raises(RequestError, match="is not stored here"):
            call("b", "r")
    assert is_there(store, "a", "r")


def test_room_is_made_among_the_responses_of_the_largest_owner() -> None:
    store = ResponseStore(20 * (OVERHEAD_BYTES + 200))
    store.put("small", response("first"), [], None)
    for number in range(200):
        assert store.put("large", response(f"r{number}"), [], None)
    assert is_there(store, "small", "first")
    assert is_there(store, "large", "r199")
    assert not is_there(store, "large", "r0")


def test_a_conversation_is_all_items_oldest_first() -> None:
    store = ResponseStore(1 << 20)
    previous = None
    for name in ("one", "two", "three"):
        store.put("a", response(name, f"{name}!"), [{"content": f"{name}?"}], previous)
        previous = name
    contents = [item["content"] for item in store.conversation("a", "three")]
    assert contents == ["one?", "one!", "two?", "two!", "three?", "three!"]
    store.delete("a", "two")
    with pytest.raises(RequestError, match="previous_response_id: 'two' is not stored here"):
        store.conversation("a", "three")


def test_what_is_continued_stays_longer() -> None:
    store = ResponseStore(10 * (OVERHEAD_BYTES + 200))
    store.put("a", response("root"), [], None)
    for number in range(100):
        store.put("a", response(f"r{number}"), [], None)
        store.conversation("a", "root")
    assert is_there(store, "a", "root")


def test_a_conversation_has_at_most_the_bytes_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.stored.store.MOST_CONTINUED_BYTES", 10_000)
    store = ResponseStore(1 << 20)
    previous = None
    for number in range(20):
        store.put("a", response(f"r{number}"), [], previous)
        previous = f"r{number}"
    assert store.conversation("a", "r2")
    with pytest.raises(RequestError, match="too long"):
        store.conversation("a", "r19")
