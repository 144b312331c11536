"""Responses in memory, by owner and id, within a bound of bytes; the oldest make room.

An owner is an API key: none sees what belongs to another. Where room is needed it is made among the
responses of the owner that holds the most.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError, invalid

OVERHEAD_BYTES = 1024  # of one response, besides its JSON
ITEM_BYTES = 256  # of the place of one item
MOST_CONTINUED_BYTES = limits.MAX_BODY_BYTES  # as if the items had been sent

Item = dict[str, Any]
GONE = (
    "is not stored here: it never was, was deleted, made room for newer ones, or the gateway was "
    "restarted"
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items of its request, as JSON."""

    body: bytes
    input_items: bytes
    previous_id: str | None  # of the response that it continues
    item_ids: tuple[str, ...]  # of both

    @property
    def num_bytes(self) -> int:
        """Bytes that it costs."""
        ids = ITEM_BYTES * len(self.item_ids)
        return len(self.body) + len(self.input_items) + ids + OVERHEAD_BYTES


class ResponseStore:
    """The stored responses of one process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_owner: dict[str, OrderedDict[str, StoredResponse]] = {}  # oldest first
        self._bytes_of: dict[str, int] = {}
        self._response_of: dict[tuple[str, str], str] = {}  # by owner and id of an item

    @property
    def num_bytes(self) -> int:
        """Bytes that all of them cost."""
        return self._num_bytes

    def put(
        self, owner: str, body: Item, input_items: Sequence[Item], previous_id: str | None
    ) -> bool:
        """Keeps a response under its id; False for one that has no room even alone."""
        ids = tuple(item["id"] for item in (*input_items, *body["output"]) if "id" in item)
        encoded = StoredResponse(_encode(body), _encode(input_items), previous_id, ids)
        if encoded.num_bytes > self._max_bytes:
            return False
        self._by_owner.setdefault(owner, OrderedDict())[body["id"]] = encoded
        self._response_of.update(((owner, item_id), body["id"]) for item_id in ids)
        self._add(owner, encoded.num_bytes)
        while self._num_bytes > self._max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._drop(largest, next(iter(self._by_owner[largest])))
        return True

    def body(self, owner: str, response_id: str) -> Item:
        """The response. Raises RequestError."""
        found: Item = json.loads(self._find(owner, response_id, "response_id").body)
        return found

    def input_items(self, owner: str, response_id: str) -> list[Item]:
        """The items of the response's request, oldest first. Raises RequestError."""
        found: list[Item] = json.loads(self._find(owner, response_id, "response_id").input_items)
        return found

    def item(self, owner: str, item_id: str) -> Item | None:
        """An item of a response or of its request; None when it is not there."""
        response_id = self._response_of.get((owner, item_id))
        if response_id is None:
            return None
        stored = self._by_owner[owner][response_id]
        items = [*json.loads(stored.input_items), *json.loads(stored.body)["output"]]
        found: Item = next(item for item in items if item.get("id") == item_id)
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Forgets a response. Raises RequestError when it is not there."""
        self._find(owner, response_id, "response_id")
        self._drop(owner, response_id)

    def conversation(self, owner: str, response_id: str) -> list[Item]:
        """All items up to the end of a response, with those that it continues, oldest first.

        Raises RequestError for a response that is gone, and for a conversation that is too long.
        """
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        num_bytes = 0
        while next_id is not None:
            found = self._find(owner, next_id, "previous_response_id")
            self._by_owner[owner].move_to_end(next_id)
            chain.append(found)
            num_bytes += found.num_bytes
            if num_bytes > MOST_CONTINUED_BYTES or len(chain) > limits.MAX_MESSAGES:
                raise invalid("previous_response_id", "the conversation has become too long")
            next_id = found.previous_id
        items: list[Item] = []
        for stored in reversed(chain):
            items += json.loads(stored.input_items)
            items += json.loads(stored.body)["output"]
        return items

    def first_of(self, owner: str, response_id: str) -> str:
        """The id of the first response of a conversation that is still known."""
        first_id, owned = response_id, self._by_owner.get(owner)
        while owned is not None and (found := owned.get(first_id)) is not None:
            if found.previous_id is None:
                break
            first_id = found.previous_id
        return first_id

    def _find(self, owner: str, response_id: str, field: str) -> StoredResponse:
        owned = self._by_owner.get(owner)
        found = None if owned is None else owned.get(response_id)
        if found is None:
            message = f"{field}: {response_id[:64]!r} {GONE}"
            raise RequestError(ErrorKind.NOT_FOUND, message, field=field)
        return found

    def _add(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + num_bytes

    def _drop(self, owner: str, response_id: str) -> None:
        dropped = self._by_owner[owner].pop(response_id)
        self._add(owner, -dropped.num_bytes)
        for item_id in dropped.item_ids:
            if self._response_of.get((owner, item_id)) == response_id:
                del self._response_of[owner, item_id]
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes_of[owner]


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
