"""The kubelet's part for one pod: from its folder to its last signal, on a thread of its own."""

import contextlib
import shutil
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.cluster.api.kinds import POD
from tests.deploy.cluster.api.store import Object, Store, is_ending, now
from tests.deploy.cluster.names import DOMAIN
from tests.deploy.cluster.network import Network
from tests.deploy.cluster.node.container import CannotStart, Container, Surroundings
from tests.deploy.cluster.node.fields import Missing, variables
from tests.deploy.cluster.node.images import Images, NoImage
from tests.deploy.cluster.node.probes import Probes
from tests.deploy.cluster.node.volumes import NotYet, Volumes

_TICK_S = 0.05
_RETRY_S = 0.5
_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 30.0  # shorter than a kubelet's 10 s and 5 minutes
_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class Node:
    """The machine of pods, and what it gives them."""

    store: Store
    network: Network
    images: Images
    folder: Path


class _Ended(Exception):
    """The pod was deleted."""


class _Slot:
    """One container of a pod, through all of its runs."""

    def __init__(self, spec: Object) -> None:
        self.spec, self.name = spec, str(spec["name"])
        self.run: Container | None = None
        self.probes: Probes | None = None
        self.num_restarts = 0
        self.reason = "ContainerCreating"
        self.message = ""
        self.again_s = 0.0
        self.is_ready = False

    @property
    def exit_code(self) -> int | None:
        return None if self.run is None else self.run.exit_code

    def status(self) -> Object:
        """As the pod's status has it."""
        code = self.exit_code
        if self.run is None:
            state: Object = {"waiting": {"reason": self.reason, "message": self.message}}
        elif code is None:
            state = {"running": {}}
        else:
            reason = "Error" if code else "Completed"
            state = {"terminated": {"exitCode": code, "reason": reason}}
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "ready": self.is_ready,
            "started": bool(self.probes and self.probes.has_started),
            "restartCount": self.num_restarts,
            "state": state,
        }


class PodRunner(threading.Thread):
    """Runs one pod until it was deleted and has ended."""

    def __init__(self, node: Node, pod: Object) -> None:
        name = f"{pod['metadata']['namespace']}_{pod['metadata']['name']}"
        super().__init__(name=f"pod {name}", daemon=True)
        self._node, self._pod = node, pod
        self._folder = node.folder / "pods" / f"{name}_{pod['metadata']['uid'][:8]}"
        self._address = node.network.pod_address()
        self._pause: subprocess.Popen[bytes] | None = None
        self._around: Surroundings | None = None
        self._init = [_Slot(each) for each in pod["spec"].get("initContainers", [])]
        self._slots = [_Slot(each) for each in pod["spec"]["containers"]]
        self._conditions: dict[str, Object] = {}
        self._published: Object = {}
        self.failure = ""  # of the stand-in itself

    @property
    def log_folder(self) -> Path:
        """Logs by container; they outlive the pod."""
        return self._folder / "logs"

    def run(self) -> None:
        """From the beginning to the end."""
        try:
            self._prepare()
            for slot in self._init:
                if not self._run_to_end(slot):
                    self._wait_for_the_end("Failed")
            self._serve()
        except _Ended:
            self._end()
        except Exception:  # else its controller would make another, and so on
            self.failure = f"{self.name}: {traceback.format_exc()}"
            self._stay()
        finally:
            self._clean()
            self._node.store.remove(POD, self._pod)

    def logs(self, container: str) -> str:
        """The words of the containers."""
        paths = sorted(self.log_folder.glob(f"{container or '*'}.log"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def _prepare(self) -> None:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        spec = self._pod["spec"]
        name = spec.get("hostname") or self._pod["metadata"]["name"]
        script = 'hostname "$0" && exec sleep infinity'
        self._pause = subprocess.Popen(["unshare", "--net", "--uts", "/bin/sh", "-c", script, name])
        self._wait_for_namespaces(self._pause.pid)
        self._node.network.connect(self._pause.pid, self._address)
        self._pod["status"] = {"podIP": self._address, "hostIP": self._node.network.resolver}
        self._write_etc(name)
        group = spec.get("securityContext", {}).get("fsGroup")
        volumes = Volumes(self._node.store, self._node.folder / "claims", self._folder)
        while self._around is None:
            try:
                made = volumes.make(self._pod)
            except NotYet as missing:
                self._say_why("ContainerCreating", str(missing))
                self._pause_for(_RETRY_S)
                continue
            groups = () if group is None else (int(group),)
            self._around = Surroundings(self._folder, made, self._pause.pid, groups)

    def _wait_for_namespaces(self, pid: int) -> None:
        """Waits until unshare has made them: before, they are this process's own."""
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{pid}/ns/net").readlink() == own:
            time.sleep(_TICK_S)

    def _write_etc(self, name: str) -> None:
        etc = self._folder / "etc"
        etc.mkdir(exist_ok=True)
        namespace = self._pod["metadata"]["namespace"]
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self._address} {name}\n")
        search = f"{namespace}.{DOMAIN} {DOMAIN} cluster.local"
        resolver = self._node.network.resolver
        lines = f"nameserver {resolver}\nsearch {search}\noptions ndots:5 timeout:1\n"
        (etc / "resolv.conf").write_text(lines)
        (etc / "nsswitch.conf").write_text("hosts: files dns\n")
        (etc / "passwd").write_text("pagewire:x:10001:10001::/cache:/nonexistent\n")

    def _run_to_end(self, slot: _Slot) -> bool:
        """Runs an init container until it succeeds; False if it failed and is not tried again."""
        while True:
            self._start(slot)
            while slot.run is None or slot.exit_code is None:
                self._pause_for(_TICK_S)
                self._publish("Pending")
                if slot.run is None:
                    self._start(slot)
            if slot.exit_code == 0:
                return True
            if self._pod["spec"].get("restartPolicy") == "Never":
                return False
            self._back_off(slot)
            while time.monotonic() < slot.again_s:
                self._pause_for(_TICK_S)

    def _serve(self) -> None:
        """Keeps the containers running, until all have ended for good or the pod is deleted."""
        for slot in self._slots:
            self._start(slot)
        while True:
            self._pause_for(_TICK_S)
            for slot in self._slots:
                self._look_after(slot)
            codes = [slot.exit_code for slot in self._slots]
            over = [c is not None and not self._is_again(c) for c in codes]
            if all(over):
                self._wait_for_the_end("Failed" if any(codes) else "Succeeded")
            running = any(slot.run is not None for slot in self._slots)
            self._publish("Running" if running else "Pending")

    def _look_after(self, slot: _Slot) -> None:
        if slot.run is None:
            if time.monotonic() >= slot.again_s:
                self._start(slot)
            return
        code = slot.exit_code
        if code is not None:
            slot.is_ready = False
            if self._is_again(code):
                self._back_off(slot)
            return
        assert slot.probes is not None
        if why := slot.probes.is_failed():
            self._say(slot, f"{why}: it is started anew")
            slot.is_ready = False
            slot.run.end(float(self._grace_s), self._address)
            self._back_off(slot)
        else:
            slot.is_ready = slot.probes.is_ready()

    def _is_again(self, code: int) -> bool:
        policy = self._pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    def _start(self, slot: _Slot) -> None:
        """Starts a container; leaves a reason if it cannot."""
        store, slot.run = self._node.store, None
        assert self._around is not None
        try:
            image = self._node.images.find(slot.spec["image"])
            known = variables(store, self._pod, slot.spec, image.variables)
            known["HOSTNAME"] = self._pod["metadata"]["name"]
            root = self._folder / "roots" / f"{slot.name}-{slot.num_restarts}"
            root.mkdir(parents=True, exist_ok=True)
            log = self.log_folder / f"{slot.name}.log"
            spec = _with_pods_context(self._pod["spec"], slot.spec)
            run = Container(spec, image, known, self._around, root, log)
            run.start()
        except (NoImage, Missing, CannotStart) as problem:
            is_image = isinstance(problem, NoImage)
            slot.reason = "ErrImagePull" if is_image else "CreateContainerConfigError"
            slot.message = str(problem)
            slot.again_s = time.monotonic() + _RETRY_S
            return
        slot.run, slot.probes = run, Probes(run, self._address)

    def _back_off(self, slot: _Slot) -> None:
        delay_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**slot.num_restarts)
        slot.again_s = time.monotonic() + delay_s
        slot.num_restarts += 1
        slot.run, slot.reason, slot.is_ready = None, "CrashLoopBackOff", False

    def _say(self, slot: _Slot, line: str) -> None:
        with (self.log_folder / f"{slot.name}.log").open("a") as said:
            said.write(f"[kubelet] {line}\n")

    def _say_why(self, reason: str, message: str) -> None:
        for slot in self._slots:
            slot.reason, slot.message = reason, message
        self._publish("Pending")

    def _pause_for(self, seconds: float) -> None:
        """Waits. Raises _Ended when the pod was deleted."""
        about = self._pod["metadata"]
        current = self._node.store.get(POD, about["namespace"], about["name"])
        if current is None or current["metadata"]["uid"] != about["uid"] or is_ending(current):
            raise _Ended
        time.sleep(seconds)

    def _wait_for_the_end(self, phase: str) -> None:
        self._publish(phase)
        while True:
            self._pause_for(_TICK_S)

    def _stay(self) -> None:
        with contextlib.suppress(_Ended):
            while True:
                self._pause_for(_RETRY_S)

    @property
    def _grace_s(self) -> int:
        return int(self._pod["spec"].get("terminationGracePeriodSeconds", _GRACE_S))

    def _end(self) -> None:
        running = [s.run for s in (*self._init, *self._slots) if s.run and s.exit_code is None]
        if running:
            with ThreadPoolExecutor(len(running)) as threads:
                for run in running:
                    threads.submit(run.end, float(self._grace_s), self._address)

    def _clean(self) -> None:
        for slot in (*self._init, *self._slots):
            if slot.run is not None:
                slot.run.kill()
        if self._pause is not None:
            self._pause.kill()
            self._pause.wait()
        shutil.rmtree(self._folder / "roots", ignore_errors=True)
        shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    def _publish(self, phase: str) -> None:
        is_ready = phase == "Running" and all(slot.is_ready for slot in self._slots)
        reason = "PodCompleted" if phase == "Succeeded" else ""
        conditions = {
            "PodScheduled": True,
            "Initialized": all(slot.exit_code == 0 for slot in self._init),
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        status = {
            "phase": phase,
            "podIP": self._address,
            "conditions": [self._condition(n, v, reason) for n, v in conditions.items()],
            "containerStatuses": [slot.status() for slot in self._slots],
            "initContainerStatuses": [slot.status() for slot in self._init],
        }

        if status != self._published:
            self._published = status
            self._node.store.update(POD, self._pod, lambda pod: pod.update(status=status))

    def _condition(self, name: str, value: bool, reason: str) -> Object:
        """A condition, with the time of its last change."""
        text, last = str(value), self._conditions.get(name, {})
        if last.get("status") != text:
            last = {"type": name, "status": text, "lastTransitionTime": now()}
        self._conditions[name] = last | ({"reason": reason} if reason and not value else {})
        return self._conditions[name]


def _with_pods_context(pod: Object, container: Object) -> Object:
    """The container with what its pod says of users, where it says nothing itself."""
    shared = {
        name: value
        for name, value in pod.get("securityContext", {}).items()
        if name in ("runAsUser", "runAsGroup", "runAsNonRoot")
    }
    return container | {"securityContext": shared | container.get("securityContext", {})}
