"""Events of a worker group: their bytes, and what readers that follow them know."""

import msgpack
import numpy as np
import pytest

from scheduler_svc.core import KvGroup
from scheduler_svc.core.kv.cache_changes import BlockRemoved, BlockStored, Cleared
from scheduler_svc.kv_events.batch import Announced, as_array


def stored(block_hash: int, parent: int | None, **more: object) -> BlockStored:
    tokens = np.array([block_hash % 1000, 7], dtype=np.int32)
    return BlockStored(0, block_hash, parent, tokens, **more)  # type: ignore[arg-type]


def test_bytes_are_those_that_readers_know() -> None:
    announced = Announced((KvGroup(2),))
    cleared = announced.events([Cleared()])
    assert msgpack.packb([1.5, cleared, 0]).hex() == (
        "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
    )
    high = 0x8000000000000001
    removed = announced.events([stored(high, None), BlockRemoved(0, high)])[1:]
    assert msgpack.packb([1.5, removed, 0]).hex() == (
        "93cb3ff8000000000000" "9183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865"
        "7391cf8000000000000001a66d656469756da347505500"
    )  # fmt: skip


def test_a_chain_is_one_event_and_what_a_block_depends_on_is_told() -> None:
    announced = Announced((KvGroup(2),))
    events = announced.events(
        [
            stored(1, None, keys=("red",)),
            stored(2, 1),
            stored(3, 2, keys=("00ff",)),
            stored(7, 3, adapter_id="fr"),  # of another adapter: not the same event
            stored(9, 1),  # another branch
            BlockRemoved(0, 2),
            BlockRemoved(0, 3),
        ]
    )
    assert [event["type"] for event in events] == ["BlockStored"] * 3 + ["BlockRemoved"]
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3],
        "parent_block_hash": None,
        "token_ids": [1, 7, 2, 7, 3, 7],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["red"], None, ["00ff"]],
    }
    assert (events[1]["parent_block_hash"], events[1]["lora_name"]) == (3, "fr")
    assert "extra_keys" not in events[2]
    assert events[3]["block_hashes"] == [2, 3]


def test_arrays_have_the_values_of_maps_without_the_last_that_say_nothing() -> None:
    announced = Announced((KvGroup(2), KvGroup(2, window=8)))
    first, removed = announced.events([stored(1, None), BlockRemoved(0, 1)])
    assert as_array(first) == [
        *("BlockStored", [1], None, [1, 7], 2, None, "GPU", None),
        *(None, 0, "full_attention"),
    ]
    assert as_array(removed) == ["BlockRemoved", [1], "GPU", 0]
    (second,) = announced.events([BlockStored(1, 1, None, np.array([1, 7], dtype=np.int32))])
    assert as_array(second)[-3:] == [1, "sliding_window", 8]
    of_one = Announced((KvGroup(2),)).events([stored(1, None, keys=("red",)), Cleared()])
    assert as_array(of_one[0])[-1] == [["red"]]
    assert [as_array(event) for event in of_one[1:]] == [
        ["BlockRemoved", [1], "GPU"],
        ["AllBlocksCleared"],
    ]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_all_that_was_announced_is_removed_by_name_before_all_is_cleared(num_groups: int) -> None:
    announced = Announced((KvGroup(2),) * num_groups)
    announced.events([stored(5, None), stored(4, 5), BlockRemoved(0, 99)])
    events = announced.clear()
    assert [event["type"] for event in events] == ["BlockRemoved", "AllBlocksCleared"]
    assert events[0]["block_hashes"] == [4, 5]
    assert announced.clear() == [{"type": "AllBlocksCleared"}]


def test_after_a_gap_no_block_follows_one_that_readers_do_not_know() -> None:
    announced = Announced((KvGroup(2),))
    announced.has_gaps = True
    events = announced.events([stored(2, 1), stored(3, 2), stored(4, None), stored(5, 4)])
    assert [event["block_hashes"] for event in events] == [[4, 5]]
    announced.events([BlockRemoved(0, 2), Cleared()])
    assert announced.events([stored(2, 1)]), "from here on all is known again"
