"""The adapters that requests may name, at all workers of this scheduler.

A worker says which adapters it was told to serve; this process collects them, so that a scheduler
which starts anew knows them again. It tells a worker nothing when that attaches: each request
brings its adapter along, and the worker reads what it lacks. A name leads to one adapter. What was
unloaded here stays so, whatever a worker still says.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc

from scheduler_svc.worker.link import LinkLost
from wire.adapters import MAX_PATH_BYTES, AdapterSource, name_problem

logger = logging.getLogger(__name__)

# Loads an adapter at one worker: its name, its path, and whether it replaces one of its name.
Load = Callable[[str, str, bool], Awaitable[AdapterSource]]
Unload = Callable[[str], Awaitable[None]]


class AdapterRefused(Exception):
    """Raised when an adapter is not loaded or unloaded; the message says why."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class AdapterRegistry:
    """Adapters by name."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.on_change = on_change
        self._sources: dict[str, AdapterSource] = {}
        self._unloaded: set[AdapterSource] = set()

    @property
    def sources(self) -> Sequence[AdapterSource]:
        """All of them, in the order in which they came."""
        return list(self._sources.values())

    def hear(self, told: Iterable[AdapterSource], worker: str) -> None:
        """Adds the adapters that a worker was told to serve."""
        for source in told:
            known = self._sources.get(source.name)
            if known is None and source not in self._unloaded:
                self._sources[source.name] = source
                self.on_change()
            elif known is not None and known.adapter_id != source.adapter_id:
                logger.warning(
                    "worker %s has another adapter %s than the others: it is not served there",
                    worker,
                    source.name,
                )

    async def load(
        self, name: str, path: str, workers: Sequence[Load], *, replaces: bool
    ) -> AdapterSource:
        """Has all workers read an adapter, and names it. Raises AdapterRefused."""
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        if problem := name_problem(name):
            raise AdapterRefused(invalid, f"name: {name!r} {problem}")
        if not path or len(path.encode()) > MAX_PATH_BYTES:
            raise AdapterRefused(invalid, f"path: must have 1 to {MAX_PATH_BYTES} bytes")
        if name in self._sources and not replaces:
            raise AdapterRefused(
                grpc.StatusCode.ALREADY_EXISTS, f"adapter {name!r} is loaded already"
            )
        if not workers:
            raise AdapterRefused(grpc.StatusCode.UNAVAILABLE, "no worker is attached")
        found = set[AdapterSource]()
        try:
            for load in workers:
                found.add(await _told(load(name, path, True)))
            if len(found) > 1:
                problem = f"path: {path} holds different adapters on the hosts of the workers"
                raise AdapterRefused(invalid, problem)
        except AdapterRefused:
            self._unloaded |= found - {self._sources.get(name)}
            raise
        (source,) = found
        self._sources[name] = source
        self._unloaded.discard(source)
        self.on_change()
        return source

    async def unload(self, name: str, workers: Sequence[Unload]) -> None:
        """Takes a name away; requests that have the adapter keep it. Raises AdapterRefused."""
        source = self._sources.pop(name, None)
        if source is None:
            raise AdapterRefused(grpc.StatusCode.NOT_FOUND, f"no adapter is named {name!r}")
        self._unloaded.add(source)
        self.on_change()
        for unload in workers:
            try:
                await unload(name)
            except (LinkLost, grpc.aio.AioRpcError) as error:
                logger.info("a worker has not unloaded adapter %s: %s", name, error)


async def _told(loading: Awaitable[AdapterSource]) -> AdapterSource:
    """The adapter that a worker has read. Raises AdapterRefused with the worker's reason."""
    try:
        return await loading
    except grpc.aio.AioRpcError as error:
        raise AdapterRefused(error.code(), error.details() or error.code().name) from error
    except LinkLost as error:
        raise AdapterRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
