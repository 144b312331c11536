"""Two ranks as threads that agree over a real store, without collectives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.pace import patience
from worker_svc.parallel.group import Group, host_store, reach_store

TIMEOUT_S = patience(30)


def on_two_ranks(work: Callable[[Group], Any]) -> list[Any]:
    """Result or RuntimeError of work on each of two ranks."""
    store = host_store(2)

    def run(rank: int) -> Any:
        try:
            return work(Group(rank, 2, store=store if rank == 0 else reach_store(store.port, 2)))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2), timeout=TIMEOUT_S))
