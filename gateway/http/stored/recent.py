"""The items of recent answers, which some clients name by their ids instead of sending them back.

They are kept in the memory of this process within a bound of bytes, of all callers and of each; the
oldest make room. A caller with a key finds its own alone. Without keys the ids are the secret: they
are random, and go to none but the caller of the answer.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from gateway.errors import limits

OVERHEAD_BYTES = 256  # of one item, besides its JSON

Item = dict[str, Any]


class RecentItems:
    """The items of the last answers of one process, by caller and id."""

    def __init__(
        self,
        max_bytes: int = limits.MAX_RECENT_ITEM_BYTES,
        max_per_caller: int = limits.MAX_RECENT_ITEM_BYTES_OF_CALLER,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_per_caller = max_per_caller
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # the oldest first
        self._callers: dict[str, OrderedDict[str, str]] = {}  # by caller: ids, and whose they are
        self._bytes_of: dict[str, int] = {}
        self.num_bytes = 0

    def put(self, owner: str, caller: str, items: Iterable[Item]) -> None:
        """Keeps items of an owner; they count as the caller's."""
        for item in items:
            encoded = json.dumps(item, separators=(",", ":")).encode()
            num_bytes = len(encoded) + OVERHEAD_BYTES
            key = owner, str(item["id"])
            if num_bytes > self._max_per_caller or key in self._items:
                continue
            self._items[key] = encoded
            self._callers.setdefault(caller, OrderedDict())[key[1]] = owner
            self._count(caller, num_bytes)
            self._make_room(caller)

    def find(self, owner: str, item_id: str) -> Item | None:
        """The item; None for one that is not, or no longer, kept for this owner."""
        encoded = self._items.get((owner, item_id))
        return None if encoded is None else dict(json.loads(encoded))

    def _make_room(self, caller: str) -> None:
        while self._bytes_of[caller] > self._max_per_caller:
            self._drop_oldest(caller)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._bytes_of, key=self._bytes_of.__getitem__))

    def _drop_oldest(self, caller: str) -> None:
        item_id, owner = self._callers[caller].popitem(last=False)
        encoded = self._items.pop((owner, item_id))
        self._count(caller, -len(encoded) - OVERHEAD_BYTES)
        if not self._callers[caller]:
            del self._callers[caller], self._bytes_of[caller]

    def _count(self, caller: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[caller] = self._bytes_of.get(caller, 0) + num_bytes
