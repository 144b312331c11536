"""Turns changes of prefix caches into events: what readers know is kept, and never contradicted.

Readers chain their own keys from tokens, so a block is announced only if the block before it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core import KvGroup
from scheduler_svc.core.kv.cache_changes import BlockRemoved, BlockStored, Change, Cleared

MEDIUM = "GPU"  # the worker's own cache, whatever its device
Event = dict[str, Any]  # a map, in the order in which an array has its values

_OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")


@dataclass(slots=True)
class Announced:
    """The knowledge of one worker group's readers, and the events that bring them further."""

    groups: Sequence[KvGroup]
    hashes: list[set[int]] = field(default_factory=list)  # by KV group
    has_gaps: bool = False  # batches were dropped: blocks may follow others that none was told of

    def __post_init__(self) -> None:
        self.hashes = [set() for _ in self.groups]

    def events(self, changes: Iterable[Change]) -> list[Event]:
        """The events of some changes, in order; neighbours that belong together are one event."""
        events = list[Event]()
        for change in changes:
            if isinstance(change, Cleared):
                events += self.clear()
            elif isinstance(change, BlockRemoved):
                self._remove(change, events)
            elif not self.has_gaps or self._knows_parent_of(change):
                self._store(change, events)
        return events

    def clear(self) -> list[Event]:
        """The events after which readers know of nothing."""
        events = list[Event]()
        for group, hashes in enumerate(self.hashes):
            if hashes:
                events.append(self._removed(group, sorted(hashes)))
                hashes.clear()
        events.append({"type": "AllBlocksCleared"})
        self.has_gaps = False
        return events

    def _knows_parent_of(self, stored: BlockStored) -> bool:
        return stored.parent is None or stored.parent in self.hashes[stored.group]

    def _remove(self, removed: BlockRemoved, events: list[Event]) -> None:
        group, block_hash = removed.group, removed.block_hash
        if block_hash not in self.hashes[group]:
            return
        self.hashes[group].remove(block_hash)
        last = events[-1] if events else None
        if last and last["type"] == "BlockRemoved" and last.get("group_idx", 0) == group:
            last["block_hashes"].append(block_hash)
        else:
            events.append(self._removed(group, [block_hash]))

    def _removed(self, group: int, hashes: list[int]) -> Event:
        event: Event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
        if len(self.groups) > 1:
            event["group_idx"] = group
        return event

    def _store(self, stored: BlockStored, events: list[Event]) -> None:
        self.hashes[stored.group].add(stored.block_hash)
        event = events[-1] if events else None
        if event is None or not _goes_on(event, stored):
            event = self._stored(stored)
            events.append(event)
        event["block_hashes"].append(stored.block_hash)
        event["token_ids"] += stored.token_ids.tolist()
        keys = event.get("extra_keys")
        if stored.keys and keys is None:
            keys = event["extra_keys"] = [None] * (len(event["block_hashes"]) - 1)
        if keys is not None:
            keys.append([*stored.keys] or None)

    def _stored(self, stored: BlockStored) -> Event:
        group, adapter = self.groups[stored.group], stored.adapter_id or None
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": stored.parent,
            "token_ids": [],
            "block_size": group.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": adapter,
        }
        if len(self.groups) > 1 or group.window is not None:
            event["group_idx"] = stored.group
            event["kv_cache_spec_kind"] = "full_attention"
        if group.window is not None:
            event["kv_cache_spec_kind"] = "sliding_window"
            event["kv_cache_spec_sliding_window"] = group.window
        return event


def as_array(event: Event) -> list[Any]:
    """The older form of an event: its name and values, without those left out at the end."""
    values = [event["type"], *(event[key] for key in event if key not in ("type", *_OPTIONAL))]
    if event["type"] == "BlockStored":
        optional = [event.get(key) for key in _OPTIONAL]
    else:
        optional = [event.get("group_idx")]
    while optional and optional[-1] is None:
        optional.pop()
    return values + optional


def _goes_on(event: Event, stored: BlockStored) -> bool:
    """True if a block follows the last one of an event."""
    if event["type"] != "BlockStored" or event["block_hashes"][-1] != stored.parent:
        return False
    is_alike = (event.get("group_idx", 0), event["lora_name"] or "")
    return is_alike == (stored.group, stored.adapter_id)
