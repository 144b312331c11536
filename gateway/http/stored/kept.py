"""Orders of one request for a response to the store."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.callers.auth import CLIENT
from gateway.errors import limits
from gateway.errors.request_errors import unsupported
from gateway.http.response_body import Item, ResponseBody, parse_items
from gateway.http.stored.recent import RecentItems
from gateway.http.stored.store import ResponseStore
from gateway.request.client_session import ClientSession
from wire.identity.access import CALLER

OFF = "nothing is stored: this gateway runs without --store-responses"


def owner() -> str:
    """Whose responses the current task may see: the key's or, without keys, all callers'."""
    caller = CALLER.get()
    return "" if caller is None else f"key {caller.name}"


@dataclass(frozen=True, slots=True)
class Kept:
    """The items that a request continues, and where its answer is to be kept."""

    response_id: str
    earlier: Sequence[Item]
    store: ResponseStore | None  # None: it is not to be kept
    input_items: Sequence[dict[str, Any]]
    previous_id: str | None
    recent: RecentItems | None  # None: the items of the answer may not be named later
    first_id: str = (
        ""  # of the responses that it continues, or its own; empty: it is not to be kept
    )

    def named(self, session: ClientSession | None) -> ClientSession | None:
        """A session under the name of its first response, where its client gives it none."""
        session = session or ClientSession()
        if self.first_id and not session.session_id:
            session = replace(session, session_id=self.first_id)
        return None if session == ClientSession() else session

    def keep(self, body: dict[str, Any]) -> None:
        """Stores an answer at its end, and says in it whether it is."""
        if self.recent is not None:
            self.recent.put(owner(), CLIENT.get(), body["output"])
        body["store"] = True
        is_kept = self.store is not None and self.store.put(
            owner(), body, self.input_items, self.previous_id
        )
        body["store"] = is_kept


def kept_for(
    body: ResponseBody, given_id: str | None, store: ResponseStore | None, recent: RecentItems
) -> Kept:
    """The request's orders to the store. Raises RequestError where they cannot be done."""
    if store is None:
        for field, asks in (
            ("store", bool(body.store)),
            ("previous_response_id", body.previous_response_id is not None),
        ):
            if asks:
                raise unsupported(field, f"{OFF}; send the items of the answer back")
    new_id = f"resp_{uuid.uuid4().hex}"
    previous_id, earlier = body.previous_response_id, []
    if store is not None and previous_id is not None:
        earlier = parse_items("previous_response_id", store.conversation(owner(), previous_id))
    named = None if body.store is False else recent
    first_id = "" if store is None or previous_id is None else store.first_of(owner(), previous_id)
    if store is None or body.store is False:
        return Kept(given_id or new_id, earlier, None, (), previous_id, named, first_id)
    # Not an id that a caller chose: where there are no keys, ids must not be guessed.
    items = [_stored(f"input[{index}]", item) for index, item in enumerate(body.input)]
    return Kept(new_id, earlier, store, items, previous_id, named, first_id or new_id)


def _stored(path: str, item: Item) -> dict[str, Any]:
    """The item with an id. Raises RequestError for what is no text, and could not be sent back."""
    fields = item.model_dump(exclude_none=True)
    limits.utf8(path, json.dumps(fields, ensure_ascii=False))
    return {"id": f"item_{uuid.uuid4().hex}", **fields}
