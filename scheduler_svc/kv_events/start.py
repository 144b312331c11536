"""Begins to publish. ZMQ is imported then: it is an extra of the package."""

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.core import KvGroup
from scheduler_svc.core.kv.cache_changes import Change
from scheduler_svc.kv_events.options import KvEventOptions


class Publisher(Protocol):
    """A publisher of the events of one worker group."""

    num_dropped: int  # batches

    def publish(self, changes: list[Change]) -> None:
        """Has these changes published, or drops them if too many batches wait."""

    def close(self) -> None:
        """Has readers told that all blocks are gone, and ends."""


def open_publisher(options: KvEventOptions, rank: int, groups: Sequence[KvGroup]) -> Publisher:
    """Publishes the events of the worker group with this rank, whose KV groups are `groups`."""
    from scheduler_svc.kv_events import publisher  # noqa: PLC0415 - see above

    return publisher.ZmqPublisher(options, rank, groups)
