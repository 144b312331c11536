"""Places among the adapters of a step: who waits, who overtakes whom, and what is forgotten."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from wire.adapters import AdapterSource
from worker_svc.adapters.errors import BadAdapter
from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.store import (
    MAX_OVERTAKES,
    AdapterLimits,
    AdapterOrder,
    AdapterOrders,
    AdapterStore,
    NameTaken,
)
from worker_svc.adapters.weights import LoadedAdapter


class FakeReader(AdapterReader):
    """Reads any folder at once, but for those whose name begins with "bad"."""

    def __init__(self) -> None:
        pass

    def read(self, name: str, folder: Path, wanted_id: str = "") -> LoadedAdapter:
        if str(folder).startswith("bad"):
            raise BadAdapter(f"{folder} is no folder")
        return LoadedAdapter(AdapterSource(name, str(folder), f"{name}@{folder}"), 8, {})


class Stream:
    """Orders of one stream, and the preparations that have a place."""

    def __init__(self, max_loras: int = 2, max_cpu: int = 4) -> None:
        self.store = AdapterStore(FakeReader(), AdapterLimits(max_loras, 16, max_cpu))
        self.placed: list[int] = []

    def order(self, *wanted: tuple[int, str], dropped: tuple[int, ...] = ()) -> list[int]:
        """Gives orders; returns the preparations that have got a place by it."""
        orders = tuple(AdapterOrder(number, source(name)) for number, name in wanted)
        before = len(self.placed)
        self.store.take_orders(AdapterOrders(orders, dropped), self._on_placed)
        return self.placed[before:]

    def run(self, entered: list[int], *running: str) -> list[int]:
        """A step after which these adapters are in slots."""
        before = len(self.placed)
        self.store.settle(entered, [source(name).adapter_id for name in running])
        return self.placed[before:]

    def _on_placed(self, order: AdapterOrder) -> None:
        self.placed.append(order.preparation_id)
        self.store.fetch(order)


def source(name: str) -> AdapterSource:
    return AdapterSource(name, "folder", f"{name}@folder")


def test_a_place_is_kept_from_the_order_until_the_slot_is_freed() -> None:
    stream = Stream(max_loras=1)
    assert stream.order((1, "a"), (2, "b"), (3, "a")) == [1, 3]
    assert stream.run([1], "a") == []
    assert stream.run([3], "a", "a") == []
    assert stream.run([], "a") == []
    assert stream.run([]) == [2]


def test_a_dropped_preparation_gives_its_place_to_the_next() -> None:
    stream = Stream(max_loras=1)
    assert stream.order((1, "a"), (2, "b"), (3, "c")) == [1]
    assert stream.order(dropped=(2, 1)) == [3]


def test_a_waiting_preparation_is_overtaken_only_so_often() -> None:
    stream = Stream(max_loras=1)
    assert stream.order((1, "a"), (2, "b")) == [1]
    others = [(number, "a") for number in range(3, 3 + MAX_OVERTAKES + 2)]
    overtaking = stream.order(*others)
    assert overtaking == [number for number, _ in others[:MAX_OVERTAKES]]
    running = ["a"] * (1 + MAX_OVERTAKES)
    assert stream.run([1, *overtaking], *running) == []
    assert stream.run([]) == [2]  # and those of "a" after it
    assert stream.run([2]) == [number for number, _ in others[MAX_OVERTAKES:]]


def test_nothing_that_waits_is_read() -> None:
    stream = Stream(max_loras=2)
    stream.order(*((number, f"a{number}") for number in range(1, 200)))
    assert stream.placed == [1, 2]
    assert stream.store.num_waiting == 197
    assert stream.store.host.num_reads <= 2


def test_a_lost_stream_leaves_no_preparation() -> None:
    stream = Stream(max_loras=1)
    stream.order((1, "a"), (2, "b"))
    stream.store.drop_all()
    stream.store.settle([], [])
    assert stream.placed == [1]
    assert stream.store.take(1) is None
    assert stream.order((1, "c")) == [1]


def test_an_adapter_in_memory_is_read_once_and_the_oldest_is_forgotten() -> None:
    stream = Stream(max_loras=2, max_cpu=2)
    host = stream.store.host
    for name in ("a", "b", "a", "a"):
        assert host.fetch(source(name)).result().source == source(name)
    assert host.num_reads == 2
    host.fetch(source("c")).result()  # in place of b, which was used before a
    host.fetch(source("a")).result()
    assert host.num_reads == 3
    host.fetch(source("b")).result()
    assert host.num_reads == 4


def test_a_failure_is_told_each_time_and_not_remembered() -> None:
    host = Stream().store.host
    bad = AdapterSource("a", "bad", "a@bad")
    for _ in range(2):
        fetching: Future[LoadedAdapter] = host.fetch(bad)
        with pytest.raises(BadAdapter, match="bad is no folder"):
            fetching.result()


def test_a_name_leads_to_one_adapter() -> None:
    names = Stream().store.names
    assert names.load("a", "x") == names.load("a", "x")
    with pytest.raises(NameTaken, match="adapter 'a' is another one, of x"):
        names.load("a", "y")
    assert names.load("a", "y", replaces=True).path == "y"
    assert [one.path for one in names.sources] == ["y"]
    assert names.unload("a")
    assert not names.unload("a")


def test_an_adapter_that_is_unloaded_or_replaced_takes_no_memory() -> None:
    store = Stream().store
    first = store.names.load("a", "x")
    assert store.host.fetch(first).result().source == first
    assert store.host.num_reads == 1
    second = store.names.load("a", "y", replaces=True)
    store.names.unload("a")
    for one in (first, second):
        store.host.fetch(one).result()
    assert store.host.num_reads == 4
