"""Orders of adapters, and their answers: between a scheduler's stream and the adapters in memory.

What becomes of an adapter is decided on the compute thread, in order with the steps; files are read
on other threads. All ranks of a group read each adapter once rank 0 has given it a place.
"""

from concurrent.futures import Future
from functools import partial

from worker_svc.adapters.errors import BadAdapter
from worker_svc.adapters.orders import encode_adapter_orders
from worker_svc.adapters.store import AdapterOrder, AdapterOrders, AdapterStore
from worker_svc.adapters.weights import LoadedAdapter
from worker_svc.parallel.leader import Ranks
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.serving.scheduler_stream import SchedulerStream


class AdapterTraffic:
    """Takes orders from any thread."""

    def __init__(self, compute: ComputeThread, ranks: Ranks) -> None:
        self._compute = compute
        self._ranks = ranks

    def take(
        self, stream: SchedulerStream, adapters: AdapterStore | None, orders: AdapterOrders
    ) -> None:
        """Answers each order on the stream once its sequence may enter, or never will."""
        if adapters is None:
            for order in orders.wanted:
                stream.adapter_prepared(order.preparation_id, "this worker serves no adapters")
            return
        self._compute.post(partial(self._take, stream, adapters, orders))

    def _take(self, stream: SchedulerStream, adapters: AdapterStore, orders: AdapterOrders) -> None:
        if stream.is_over:
            return
        if orders.dropped_ids:
            self._ranks.prepare(encode_adapter_orders(AdapterOrders((), orders.dropped_ids)))
        adapters.take_orders(orders, partial(self._fetch, stream, adapters))

    def _fetch(self, stream: SchedulerStream, adapters: AdapterStore, order: AdapterOrder) -> None:
        self._ranks.prepare(encode_adapter_orders(AdapterOrders((order,), ())))
        came = partial(self._came, stream, adapters, order)
        adapters.fetch(order).add_done_callback(
            lambda done: self._compute.post(partial(came, done))
        )

    def _came(
        self,
        stream: SchedulerStream,
        adapters: AdapterStore,
        order: AdapterOrder,
        fetched: "Future[LoadedAdapter]",
    ) -> None:
        number = order.preparation_id
        if stream.is_over or not adapters.holds(number):
            return
        problem = ""
        if (error := fetched.exception()) is not None:
            self._ranks.prepare(encode_adapter_orders(AdapterOrders((), (number,))))
            adapters.drop([number])
            problem = str(error)
            if not isinstance(error, BadAdapter):
                problem = f"{type(error).__name__}: {problem}"
        stream.adapter_prepared(number, f"{order.source.name}: {problem}" if problem else "")
