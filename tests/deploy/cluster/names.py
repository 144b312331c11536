"""A name server for the pods: services, headless ones by their pods, and pods of StatefulSets."""

import contextlib
import socket
import struct
import threading

from tests.deploy.cluster.api.kinds import SERVICE
from tests.deploy.cluster.api.store import Object, Store
from tests.deploy.cluster.endpoints import members

DOMAIN = "svc.cluster.local"
_A, _IN, _TTL_S = 1, 1, 1
_NO_SUCH_NAME = 3


class NameServer:
    """Answers over UDP at one address, port 53."""

    def __init__(self, store: Store, address: str) -> None:
        self._store = store
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def addresses(self, name: str) -> list[str] | None:
        """Addresses of a full name; None if there is no such name."""
        if not name.endswith(f".{DOMAIN}"):
            return None
        *pod, service, namespace = name.removesuffix(f".{DOMAIN}").split(".")[-3:]
        found = self._store.get(SERVICE, namespace, service)
        if found is None:
            return None
        return self._of_service(found, pod[0] if pod else "")

    def _of_service(self, service: Object, pod_name: str) -> list[str] | None:
        address = service["spec"].get("clusterIP", "None")
        if address != "None":
            return None if pod_name else [address]
        pods = members(self._store, service)
        if not pod_name:
            return [pod["status"]["podIP"] for pod in pods]
        named = [pod for pod in pods if _host(pod, service) == pod_name]
        return [pod["status"]["podIP"] for pod in named] or None

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(2048)
            except OSError:
                return
            if not query:
                return
            with contextlib.suppress(OSError, IndexError, struct.error):
                self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        labels, place = [], 12
        while length := query[place]:
            labels.append(query[place + 1 : place + 1 + length].decode("ascii", "replace"))
            place += 1 + length
        question = query[12 : place + 5]
        (wanted,) = struct.unpack("!H", query[place + 1 : place + 3])
        found = self.addresses(".".join(labels).lower())
        records = [
            struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
            for address in (found or [] if wanted == _A else [])
        ]
        flags = 0x8580 | (0 if found is not None else _NO_SUCH_NAME)
        head = query[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
        return head + question + b"".join(records)


def _host(pod: Object, service: Object) -> str:
    """The name that a pod has below a service, if it has one there."""
    spec = pod["spec"]
    is_there = spec.get("subdomain") == service["metadata"]["name"]
    return str(spec.get("hostname", pod["metadata"]["name"])) if is_there else ""
