"""Probes of a container: how each kind asks, and after how many answers it counts."""

import http.client
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from pagewire._channel import Connection
from pagewire.cli import health
from tests.deploy.cluster.api.store import Object
from tests.deploy.cluster.node.container import Container


@dataclass(slots=True)
class Probe:
    """One probe of one run of a container."""

    spec: Object
    container: Container
    address: str
    outcome: bool | None = None  # None until a threshold is reached
    _num_alike: int = 0
    _last: bool = False
    _due_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        delay_s = float(self.spec.get("initialDelaySeconds", 0))
        self._due_s = self.container.started_s + delay_s

    def poll(self) -> bool | None:
        """Asks if it is time to; returns what counts now."""
        if time.monotonic() < self._due_s:
            return self.outcome
        self._due_s = time.monotonic() + float(self.spec.get("periodSeconds", 10))
        passed = self._ask(float(self.spec.get("timeoutSeconds", 1)))
        self._num_alike = self._num_alike + 1 if passed == self._last else 1
        self._last = passed
        name, default = ("successThreshold", 1) if passed else ("failureThreshold", 3)
        if self._num_alike >= int(self.spec.get(name, default)):
            self.outcome = passed
        return self.outcome

    def _ask(self, timeout_s: float) -> bool:
        if "exec" in self.spec:
            return self.container.run(self.spec["exec"]["command"], timeout_s) == 0
        if "grpc" in self.spec:
            asked = self.spec["grpc"]
            target = f"{self.address}:{self._port(asked['port'])}"
            service = asked.get("service") or ""
            return health.check(Connection(target), timeout_s, service).is_serving
        if "httpGet" in self.spec:
            return self._http(self.spec["httpGet"], timeout_s)
        return self._tcp(self.spec["tcpSocket"], timeout_s)

    def _http(self, asked: Object, timeout_s: float) -> bool:
        where: dict[str, Any] = {"timeout": timeout_s}
        opener: Any = http.client.HTTPConnection
        if asked.get("scheme") == "HTTPS":  # kubelets do not check the certificate
            opener, where["context"] = http.client.HTTPSConnection, ssl._create_unverified_context()
        host = asked.get("host") or self.address
        connection = opener(host, self._port(asked["port"]), **where)
        headers = {each["name"]: each["value"] for each in asked.get("httpHeaders", [])}
        try:
            connection.request("GET", asked.get("path", "/"), headers=headers)
            return bool(200 <= connection.getresponse().status < 400)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tcp(self, asked: Object, timeout_s: float) -> bool:
        try:
            with socket.create_connection((self.address, self._port(asked["port"])), timeout_s):
                return True
        except OSError:
            return False

    def _port(self, wanted: int | str) -> int:
        if isinstance(wanted, int):
            return wanted
        ports = self.container.spec.get("ports", [])
        return next(int(port["containerPort"]) for port in ports if port.get("name") == wanted)


class Probes:
    """The three probes of one run, in the order in which they matter."""

    def __init__(self, container: Container, address: str) -> None:
        def probe(name: str) -> Probe | None:
            spec = container.spec.get(name)
            return None if spec is None else Probe(spec, container, address)

        self._startup = probe("startupProbe")
        self._liveness, self._readiness = probe("livenessProbe"), probe("readinessProbe")
        self.has_started = self._startup is None

    def is_ready(self) -> bool:
        """Asks the readiness probe, once the container has started."""
        if not self.has_started:
            return False
        return self._readiness is None or self._readiness.poll() is True

    def is_failed(self) -> str:
        """Why the container is to be started anew; empty if it is not."""
        if not self.has_started:
            assert self._startup is not None
            outcome = self._startup.poll()
            self.has_started = outcome is True
            return "its startup probe failed" if outcome is False else ""
        if self._liveness is not None and self._liveness.poll() is False:
            return "its liveness probe failed"
        return ""
