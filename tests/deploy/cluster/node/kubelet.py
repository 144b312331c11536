"""Runs every pod that the store holds, on this machine."""

import copy
import threading
from pathlib import Path

from tests.deploy.cluster.api.kinds import POD
from tests.deploy.cluster.api.store import is_ending
from tests.deploy.cluster.node.pod import Node, PodRunner

_CHECK_S = 0.2


class Kubelet:
    """Starts a runner for each new pod; a pod that was deleted ends by its runner."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runners: dict[str, PodRunner] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deletes all pods and waits for their ends."""
        self._over.set()
        self._thread.join()
        for pod in self._node.store.all_of(POD):
            self._node.store.remove(POD, pod)
        for runner in self._runners.values():
            runner.join()

    def logs(self, namespace: str, name: str, container: str) -> str:
        """The words of a pod, also of one that is gone."""
        found = [r for r in self._runners.values() if r.name == f"pod {namespace}_{name}"]
        return found[-1].logs(container) if found else ""

    def log_files(self) -> list[Path]:
        """The log files of all pods that there were."""
        return [p for r in list(self._runners.values()) for p in sorted(r.log_folder.glob("*.log"))]

    def failures(self) -> list[str]:
        """Failures of this stand-in, not of a pod."""
        return [runner.failure for runner in list(self._runners.values()) if runner.failure]

    def _run(self) -> None:
        version = 0
        while not self._over.is_set():
            version = self._node.store.wait(version, _CHECK_S)
            for pod in self._node.store.all_of(POD):
                uid = pod["metadata"]["uid"]
                if uid not in self._runners and not is_ending(pod):
                    self._runners[uid] = PodRunner(self._node, copy.deepcopy(pod))
                    self._runners[uid].start()
                elif uid not in self._runners:
                    self._node.store.remove(POD, pod)
