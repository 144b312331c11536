"""A cluster on this machine: an API server, controllers, a kubelet, a network and names.

Pods are processes with namespaces of their own, started from what the objects say. Left out, as
far as pods could notice: limits of resources, NetworkPolicies, several nodes, and identities.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from tests.deploy.cluster.api.kinds import POD, SERVICE
from tests.deploy.cluster.api.server import ApiServer
from tests.deploy.cluster.api.store import Object, Store
from tests.deploy.cluster.endpoints import Services
from tests.deploy.cluster.names import NameServer
from tests.deploy.cluster.network import Network
from tests.deploy.cluster.node.images import Images
from tests.deploy.cluster.node.kubelet import Kubelet
from tests.deploy.cluster.node.pod import Node
from tests.deploy.cluster.workloads import Controllers
from tests.pace import patience

_POLL_S = 0.05
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Tools:
    """helm and kubectl."""

    helm: Path
    kubectl: Path


class StandIn:
    """The running cluster; without pods and processes after the block."""

    def __init__(self, images: Images, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = contextlib.ExitStack()
        self.store = Store()
        network = Network()
        self._parts.callback(network.close)
        names = NameServer(self.store, network.resolver)
        self._parts.callback(names.stop)
        services = Services(self.store, network)
        self._parts.callback(services.stop)
        self.kubelet = Kubelet(Node(self.store, network, images, folder))
        self._parts.callback(self.kubelet.stop)
        self.controllers = Controllers(self.store)
        self._parts.callback(self.controllers.stop)
        server = ApiServer(self.store, self.kubelet.logs)
        self._parts.callback(server.stop)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(_KUBECONFIG.format(url=server.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def service_address(self, namespace: str, name: str) -> str:
        """The address at which a service is reached from this machine."""

        def look() -> str | None:
            found = self.store.get(SERVICE, namespace, name)
            return None if found is None else found["spec"].get("clusterIP")

        return self.wait_for(look, f"service {name}")

    def pods(self, namespace: str) -> list[Object]:
        """Pods of a namespace, those that end included."""
        return self.store.all_of(POD, namespace)

    def processes(self) -> list[int]:
        """Processes whose root is that of a pod, living or dead."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (entry / "root").readlink().is_relative_to(self.folder):
                    found.append(int(entry.name))
        return found

    def wait_for(self, look: Callable[[], Found | None], what: str, limit_s: float = 60.0) -> Found:
        """Looks until something is found; fails with the pods' last words."""
        deadline_s = time.monotonic() + patience(limit_s)
        while not (found := look()):
            assert time.monotonic() < deadline_s, f"no {what}:\n{self.words()}"
            assert not self.failures(), self.failures()
            time.sleep(_POLL_S)
        return found

    def failures(self) -> list[str]:
        """Failures of the stand-in, not of its pods."""
        return self.kubelet.failures() + self.controllers.failures

    def words(self) -> str:
        """The end of each container's log, and what its pod's status says."""
        parts = [f"{p.parent.parent.name}: {p.read_text(errors='replace')[-1500:]}"
                 for p in self.kubelet.log_files()]  # fmt: skip
        states = [
            f"{pod['metadata']['name']}: {pod.get('status', {}).get('containerStatuses')}"
            for pod in self.store.all_of(POD)
        ]
        return "\n".join([*parts, *states])


@dataclass(frozen=True, slots=True)
class Client:
    """helm and kubectl, talking to one cluster."""

    tools: Tools
    kubeconfig: Path
    home: Path

    def helm(self, *line: str) -> "subprocess.CompletedProcess[str]":
        """Runs helm."""
        return self._run(self.tools.helm, *line)

    def kubectl(self, *line: str) -> "subprocess.CompletedProcess[str]":
        """Runs kubectl."""
        return self._run(self.tools.kubectl, *line)

    def _run(self, program: Path, *line: str) -> "subprocess.CompletedProcess[str]":
        variables = {
            "HOME": str(self.home),
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": "/usr/bin:/bin",
        }
        return subprocess.run(
            [str(program), *line],
            env=variables,
            capture_output=True,
            text=True,
            timeout=patience(600),
        )


_KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "{url}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
users: [{{name: me, user: {{}}}}]
current-context: here
"""
