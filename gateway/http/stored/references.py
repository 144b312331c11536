"""References to items of earlier answers, replaced by the items."""

from collections.abc import Sequence

from gateway.errors.request_errors import unsupported
from gateway.http.response_body import Item, ItemReference, parse_items
from gateway.http.stored.recent import RecentItems
from gateway.http.stored.store import ResponseStore

GONE = (
    "is not kept here: it never was, made room for newer ones, or another process of the gateway "
    "has it; send the items of the answer themselves, as clients do with store: false"
)


def resolved(
    items: Sequence[Item], owner: str, recent: RecentItems, store: ResponseStore | None
) -> list[Item]:
    """The items without references. Raises RequestError for one to an item that is not kept."""
    found: list[Item] = []
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            found.append(item)
            continue
        kept = recent.find(owner, item.id)
        if kept is None and store is not None:
            kept = store.item(owner, item.id)
        if kept is None:
            raise unsupported(f"input[{index}].type", f"the item {item.id[:64]!r} {GONE}")
        found += parse_items(f"input[{index}]", [kept])
    return found
