"""A reader of KV events: it knows of the prefix caches what the events told, and checks them."""

from collections.abc import Iterable, Sequence

from scheduler_svc.core import KvGroup, Scheduler
from scheduler_svc.core.kv.cache_changes import BlockRemoved, BlockStored, Cleared
from scheduler_svc.kv_events.batch import Announced, Event

Content = tuple[int | None, tuple[int, ...]]  # parent and tokens


class CacheReader:
    """Follows a scheduler from its start, whose caches are followed."""

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self.known: list[dict[int, Content]] = [{} for _ in groups]
        self._announced = Announced(groups)
        self._ever = [set[int]() for _ in self.known]  # since all was cleared

    def check(self, scheduler: Scheduler) -> None:
        """Reads on. What is told and what still waits are together what can be found."""
        self.read(self._announced.events(scheduler.take_cache_changes()))
        found = [set(known) for known in self.known]
        changes = scheduler.internal_state.changes
        for _, change in () if changes is None else changes._waiting:
            if isinstance(change, BlockStored):
                found[change.group].add(change.block_hash)
            elif isinstance(change, BlockRemoved):
                found[change.group].remove(change.block_hash)
            else:
                assert isinstance(change, Cleared)
                found = [set() for _ in found]
        caches = scheduler.internal_state.pool.caches
        assert found == [set(cache._block_of) for cache in caches]
        for known, cache in zip(self.known, caches, strict=True):
            for block_hash in known.keys() & cache._block_of.keys():
                parent, tokens = known[block_hash]
                block_id = cache._block_of[block_hash]
                assert tuple(cache._tokens[block_id].tolist()) == tokens
                assert parent in (None, int(cache._parents[block_id]))

    def read(self, events: Iterable[Event]) -> None:
        """Applies events as a router does, which chains its own keys from tokens and parents."""
        for event in events:
            group = event.get("group_idx", 0)
            if event["type"] == "AllBlocksCleared":
                assert not any(self.known), "some readers need to be told of each block"
                self._ever = [set() for _ in self.known]
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.known[group][block_hash]
            else:
                self._store(group, event)

    def _store(self, group: int, event: Event) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        tokens = event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        for place, block_hash in enumerate(event["block_hashes"]):
            assert parent is None or parent in self._ever[group], "its parent was never announced"
            assert block_hash not in self.known[group], "a content is announced once"
            content = tuple(tokens[place * size : (place + 1) * size])
            self.known[group][block_hash] = parent, content
            self._ever[group].add(block_hash)
            parent = block_hash
