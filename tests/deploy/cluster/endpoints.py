"""Services: which pods are members, and relays from a service's address to one that is ready."""

import asyncio
import contextlib
import itertools
import threading
from typing import Any

from tests.deploy.cluster.api.kinds import POD, SERVICE
from tests.deploy.cluster.api.store import Object, Store, is_ending
from tests.deploy.cluster.network import Network

_CHUNK = 1 << 16
_CHECK_S = 0.1


def is_ready(pod: Object) -> bool:
    """True if a pod says that it is ready."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def members(store: Store, service: Object) -> list[Object]:
    """Pods that a service leads to: those that are ready and do not end, or all with an address."""
    selector = service["spec"].get("selector") or {}
    takes_all = service["spec"].get("publishNotReadyAddresses", False)
    found = []
    for pod in store.all_of(POD, service["metadata"]["namespace"]):
        labels = pod["metadata"].get("labels", {})
        if not selector or any(labels.get(name) != value for name, value in selector.items()):
            continue
        if not pod.get("status", {}).get("podIP"):
            continue
        if takes_all or (is_ready(pod) and not is_ending(pod)):
            found.append(pod)
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def target_port(port: Object, pod: Object) -> int | None:
    """The port of a pod that a service's port leads to; None if the pod has none of that name."""
    wanted = port.get("targetPort", port["port"])
    if isinstance(wanted, int):
        return wanted
    for container in pod["spec"]["containers"]:
        for each in container.get("ports", []):
            if each.get("name") == wanted:
                return int(each["containerPort"])
    return None


class Services:
    """Gives each service an address, and relays its ports, on a thread of its own."""

    def __init__(self, store: Store, network: Network) -> None:
        self._store, self._network = store, network
        self._turns = itertools.count()
        self._relays: dict[tuple[str, int], asyncio.Server] = {}
        # The loop alone does not keep a task that waits: it may be freed, which is a warning.
        self._connections: set[asyncio.Task[None] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all relays."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        while not self._over.is_set():
            await self._refresh()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _CHECK_S)
        for relay in self._relays.values():
            relay.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(_CHECK_S)  # connections close in the loop's next rounds

    async def _refresh(self) -> None:
        wanted = set()
        for service in self._store.all_of(SERVICE):
            address = service["spec"].get("clusterIP") or self._give_address(service)
            if address == "None":
                continue
            for port in service["spec"]["ports"]:
                key = (address, int(port["port"]))
                wanted.add(key)
                if key not in self._relays:
                    about = (service["metadata"]["namespace"], service["metadata"]["name"])
                    self._relays[key] = await self._listen(key, about, port)
        for key in set(self._relays) - wanted:
            self._relays.pop(key).close()

    def _give_address(self, service: Object) -> str:
        address = self._network.service_address()

        def give(current: Object) -> None:
            current["spec"]["clusterIP"] = address

        self._store.update(SERVICE, service, give)
        return address

    async def _listen(
        self, key: tuple[str, int], about: tuple[str, str], port: Object
    ) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            self._connections.add(task)
            try:
                with contextlib.suppress(OSError):
                    await self._relay(about, port, reader, writer)
            finally:
                writer.close()
                self._connections.discard(task)

        return await asyncio.start_server(connected, *key)

    async def _relay(
        self,
        about: tuple[str, str],
        port: Object,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Leads one connection to a member, in turn; none is ready: it is reset."""
        service = self._store.get(SERVICE, *about)
        pods = members(self._store, service) if service else []
        if not pods:
            writer.transport.abort()
            return
        pod = pods[next(self._turns) % len(pods)]
        number = target_port(port, pod)
        there, back = await asyncio.open_connection(pod["status"]["podIP"], number)
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            back.close()


async def _copy(source: asyncio.StreamReader, target: Any) -> None:
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.transport.abort()  # what one side lost, the other is told
