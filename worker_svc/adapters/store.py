"""Adapters in memory: those that have names, those that sequences wait for, and those that run.

Host memory has up to `max_cpu` of them, and forgets the one that was used longest ago. The rows of
a step have up to `max_loras`: those of sequences in slots or about to enter one have a place. A
preparation first waits for a place, then for the files, so memory is bounded however many wait, and
none of them holds a slot. Places are given in the order of arrival; a sequence whose adapter has a
place already may overtake those that wait, but each of them only a limited number of times.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wire.adapters import AdapterSource
from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.weights import LoadedAdapter, StepAdapters

MAX_OVERTAKES = 16  # of one waiting preparation by those of adapters that have a place
_READERS = 2  # threads, so that one slow folder does not hold up all others

if TYPE_CHECKING:
    from worker_svc.adapters.on_device import DeviceAdapters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """An adapter to prepare for one sequence."""

    preparation_id: int
    source: AdapterSource


@dataclass(frozen=True, slots=True)
class AdapterOrders:
    """A frame of them, and the ids of earlier preparations that are not needed any more."""

    wanted: tuple[AdapterOrder, ...]
    dropped_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of the adapters of a worker; all are at least 1."""

    max_loras: int  # that the rows of a step have together
    max_rank: int
    max_cpu: int  # in host memory; at least max_loras


class HostAdapters:
    """Adapters that have been read, by id: each once, however many ask for it. For any thread."""

    def __init__(self, reader: AdapterReader, max_adapters: int) -> None:
        self._reader = reader
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # last used last
        self._reading: dict[str, Future[LoadedAdapter]] = {}
        self._readers = ThreadPoolExecutor(_READERS, "adapters")
        self.num_reads = 0

    def read(self, name: str, path: str) -> LoadedAdapter:
        """Reads a folder, whatever is known of it. Raises BadAdapter."""
        adapter = self._reader.read(name, Path(path))
        self._keep(adapter)
        return adapter

    def fetch(self, source: AdapterSource) -> "Future[LoadedAdapter]":
        """The adapter, which may have to be read again; its failure is a BadAdapter."""
        with self._lock:
            known = self._loaded.get(source.adapter_id)
            if known is not None:
                self._loaded.move_to_end(source.adapter_id)
                found: Future[LoadedAdapter] = Future()
                found.set_result(known)
                return found
            reading = self._reading.get(source.adapter_id)
            if reading is None:
                reading = self._readers.submit(self._read, source)
                self._reading[source.adapter_id] = reading
                reading.add_done_callback(lambda _: self._reading.pop(source.adapter_id, None))
            return reading

    def _read(self, source: AdapterSource) -> LoadedAdapter:
        adapter = self._reader.read(source.name, Path(source.path), source.adapter_id)
        self._keep(adapter)
        return adapter

    def _keep(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            self.num_reads += 1
            self._loaded[adapter.source.adapter_id] = adapter
            self._loaded.move_to_end(adapter.source.adapter_id)
            while len(self._loaded) > self._max_adapters:
                self._loaded.popitem(last=False)

    def forget(self, adapter_id: str) -> None:
        """Gives up an adapter's memory, once no sequence has it."""
        with self._lock:
            self._loaded.pop(adapter_id, None)


class Names:
    """The adapters that requests may name, as this worker was told. For any thread."""

    def __init__(self, host: HostAdapters) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._sources: dict[str, AdapterSource] = {}

    @property
    def sources(self) -> tuple[AdapterSource, ...]:
        """All of them, in the order in which they came."""
        with self._lock:
            return tuple(self._sources.values())

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterSource:
        """Reads an adapter and names it. Raises BadAdapter and NameTaken."""
        source = self._host.read(name, path).source
        with self._lock:
            known = self._sources.get(name)
            if known is not None and known != source and not replaces:
                raise NameTaken(f"adapter {name!r} is another one, of {known.path}")
            self._sources[name] = source
        if known is not None and known.adapter_id != source.adapter_id:
            self._host.forget(known.adapter_id)
        log.info("adapter %s is loaded from %s", name, path)
        return source

    def unload(self, name: str) -> bool:
        """Names an adapter no more; False if there is none of this name."""
        with self._lock:
            source = self._sources.pop(name, None)
        if source is not None:
            self._host.forget(source.adapter_id)
            log.info("adapter %s is unloaded", name)
        return source is not None


class NameTaken(ValueError):
    """Another adapter has the name already."""


@dataclass(slots=True)
class _Waiting:
    """A preparation whose adapter has no place yet."""

    order: AdapterOrder
    num_overtaken: int = 0


class AdapterStore:
    """The adapters of the sequences of one stream, over those of the host.

    All methods belong to the compute thread.
    """

    def __init__(
        self,
        reader: AdapterReader,
        limits: AdapterLimits,
        step: StepAdapters | None = None,
        device: "DeviceAdapters | None" = None,
    ) -> None:
        """`step` is what the model's layers ask on a CPU, `device` elsewhere."""
        self.limits = limits
        self.device = device
        self.step = step or StepAdapters()
        self.host = HostAdapters(reader, limits.max_cpu)
        self.names = Names(self.host)
        self._waiting: list[_Waiting] = []
        self._placed: dict[int, str] = {}  # preparations that have a place -> adapter id
        self._fetched: dict[int, Future[LoadedAdapter]] = {}  # of these
        self._running: Counter[str] = Counter()  # sequences in slots, by adapter id
        self._on_placed: Callable[[AdapterOrder], None] = lambda _: None

    @property
    def num_waiting(self) -> int:
        """Preparations that wait for a place."""
        return len(self._waiting)

    def take_orders(self, orders: AdapterOrders, on_placed: Callable[[AdapterOrder], None]) -> None:
        """Has sequences wait for their adapters; `on_placed` is called for each that has a place.

        It is called now or in a later call of this object, and should call `fetch`.
        """
        self.drop(orders.dropped_ids)
        self._waiting += map(_Waiting, orders.wanted)
        self._on_placed = on_placed
        self._give_places()

    def fetch(self, order: AdapterOrder) -> "Future[LoadedAdapter]":
        """Reads the adapter of a preparation that has a place; its failure is a BadAdapter."""
        number, source = order.preparation_id, order.source
        self._placed[number] = source.adapter_id
        fetching = self._fetched[number] = self.host.fetch(source)
        return fetching

    def holds(self, preparation_id: int) -> bool:
        """True if a preparation has a place."""
        return preparation_id in self._fetched

    def take(self, preparation_id: int) -> LoadedAdapter | None:
        """The adapter of an entering sequence; None if it was not prepared.

        Waits for it where this is another rank than the one that has answered. Raises BadAdapter.
        """
        fetching = self._fetched.get(preparation_id)
        return None if fetching is None else fetching.result()

    def settle(self, entered_ids: Iterable[int], running: Iterable[str]) -> None:
        """A step worked: these preparations are used up, and its slots have these adapters."""
        self._running = Counter(running)
        self.drop(entered_ids)

    def drop(self, preparation_ids: Iterable[int]) -> None:
        """Forgets preparations, and gives their places to others."""
        dropped = {*preparation_ids}
        for number in dropped:
            self._placed.pop(number, None)
            self._fetched.pop(number, None)
        self._waiting = [one for one in self._waiting if one.order.preparation_id not in dropped]
        self._give_places()

    def drop_all(self) -> None:
        """Forgets all preparations: the scheduler that asked for them is gone."""
        self._waiting.clear()
        self._placed.clear()
        self._fetched.clear()

    def _give_places(self) -> None:
        """Places the preparations for whose adapters there is room now, in their order."""
        if not self._waiting:
            return
        placed, left = {*self._running, *self._placed.values()}, list[_Waiting]()
        found = list[AdapterOrder]()
        for one in self._waiting:
            adapter_id = one.order.source.adapter_id
            may_overtake = all(other.num_overtaken < MAX_OVERTAKES for other in left)
            has_place = adapter_id in placed or len(placed) < self.limits.max_loras
            if not has_place or not may_overtake:
                left.append(one)
                continue
            for other in left:
                other.num_overtaken += 1
            placed.add(adapter_id)
            self._placed[one.order.preparation_id] = adapter_id
            found.append(one.order)
        self._waiting = left
        for order in found:
            self._on_placed(order)
