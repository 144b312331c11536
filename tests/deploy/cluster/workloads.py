"""The controllers' part: makes the pods of Deployments and StatefulSets, and replaces them."""

import hashlib
import json
import math
import threading
import traceback
import uuid
from typing import Any

from tests.deploy.cluster.api.kinds import CLAIM, DEPLOYMENT, POD, STATEFUL_SET, Kind
from tests.deploy.cluster.api.store import Object, Store, is_ending, now, owned
from tests.deploy.cluster.endpoints import is_ready

HASH = "pod-template-hash"
REVISION = "controller-revision-hash"
_CHECK_S = 0.2


class Controllers:
    """Brings what there is to what is wanted, again and again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._over = threading.Event()
        self.failures: list[str] = []  # of the stand-in itself
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it; pods stay."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        version = 0
        while not self._over.is_set():
            version = self._store.wait(version, _CHECK_S)
            try:
                self._look()
            except Exception:
                self.failures.append(traceback.format_exc())

    def _look(self) -> None:
        for deployment in self._store.all_of(DEPLOYMENT):
            DeploymentStep(self._store, deployment).take()
        for stateful_set in self._store.all_of(STATEFUL_SET):
            StatefulSetStep(self._store, stateful_set).take()
        self._bind_claims()
        self._collect_orphans()

    def _bind_claims(self) -> None:
        for claim in self._store.all_of(CLAIM):
            if claim.get("status", {}).get("phase") != "Bound":
                self._store.update(CLAIM, claim, lambda c: c.update(status={"phase": "Bound"}))

    def _collect_orphans(self) -> None:
        """Deletes pods whose owner is gone."""
        uids = {
            o["metadata"]["uid"] for k in (DEPLOYMENT, STATEFUL_SET) for o in self._store.all_of(k)
        }
        for pod in self._store.all_of(POD):
            owners = {each["uid"] for each in pod["metadata"].get("ownerReferences", [])}
            if owners and not owners & uids:
                delete_pod(self._store, pod)


def delete_pod(store: Store, pod: Object) -> None:
    """Asks a pod's kubelet to end it."""

    def end(current: Object) -> None:
        current["metadata"].setdefault("deletionTimestamp", now())

    store.update(POD, pod, end)


def revision(template: Object) -> str:
    """A name for what a template says."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


class _Step:
    """The common part of both kinds' steps."""

    kind: Kind
    label: str

    def __init__(self, store: Store, owner: Object) -> None:
        self._store, self._owner, self._spec = store, owner, owner["spec"]
        self._wanted = int(self._spec.get("replicas", 1))
        self._revision = revision(self._spec["template"])
        pods = store.all_of(POD, owner["metadata"]["namespace"])
        self._pods = sorted(owned(pods, owner), key=lambda p: str(p["metadata"]["name"]))
        self._active = [
            pod
            for pod in self._pods
            if not is_ending(pod) and pod.get("status", {}).get("phase") not in ("Failed",)
        ]

    @property
    def _new(self) -> list[Object]:
        return [p for p in self._active if p["metadata"]["labels"][self.label] == self._revision]

    def _ends(self) -> bool:
        """Deletes the pods of an owner that was deleted and waits for them; whether it was."""
        if not is_ending(self._owner):
            return False
        for pod in self._active:
            delete_pod(self._store, pod)
        if not self._pods:
            self._store.remove(self.kind, self._owner)
        return True

    def _create(self, name: str, changes: Object | None = None) -> None:
        template = self._spec["template"]
        about, owner = template.get("metadata", {}), self._owner["metadata"]
        reference = {"kind": self.kind.name, "name": owner["name"], "uid": owner["uid"]}
        labels = about.get("labels", {}) | {self.label: self._revision}
        metadata = {
            "name": name,
            "namespace": owner["namespace"],
            "labels": labels | ((changes or {}).pop("labels", {})),
            "annotations": about.get("annotations", {}),
            "ownerReferences": [reference],
        }
        self._store.put(POD, {"metadata": metadata, "spec": template["spec"] | (changes or {})})

    def _publish(self, **more: Any) -> None:
        ready = [pod for pod in self._active if is_ready(pod)]
        status = {
            "observedGeneration": self._owner["metadata"]["generation"],
            "replicas": len(self._active),
            "updatedReplicas": len(self._new),
            "readyReplicas": len(ready),
            "availableReplicas": len(ready),
            **more,
        }
        if self._owner.get("status") != status:
            self._store.update(self.kind, self._owner, lambda o: o.update(status=status))


class DeploymentStep(_Step):
    """One look at a Deployment. A pod is deleted only while enough others are ready."""

    kind, label = DEPLOYMENT, HASH

    def take(self) -> None:
        """Creates and deletes what the strategy allows now."""
        if self._ends():
            return
        old = [pod for pod in self._active if pod not in self._new]
        strategy = self._spec.get("strategy", {})
        if strategy.get("type") == "Recreate":
            self._recreate(old)
        else:
            self._roll(old, strategy.get("rollingUpdate", {}))
        surplus = len(self._new) - self._wanted
        for pod in sorted(self._new, key=is_ready)[: max(0, surplus)]:
            delete_pod(self._store, pod)
        self._say()

    def _recreate(self, old: list[Object]) -> None:
        for pod in old:
            delete_pod(self._store, pod)
        if len(self._pods) == len(self._new):  # none ends any more, either
            self._add(self._wanted - len(self._new))

    def _roll(self, old: list[Object], limits: Object) -> None:
        surge = _share(limits.get("maxSurge", "25%"), self._wanted, math.ceil)
        missing = _share(limits.get("maxUnavailable", "25%"), self._wanted, math.floor)
        room = self._wanted + surge - len(self._active)
        self._add(min(room, self._wanted - len(self._new)))
        num_ready = sum(is_ready(pod) for pod in self._active)
        for pod in sorted(old, key=is_ready):
            if is_ready(pod):
                if num_ready - 1 < self._wanted - missing:
                    break
                num_ready -= 1
            delete_pod(self._store, pod)

    def _add(self, count: int) -> None:
        for _ in range(count):
            suffix = uuid.uuid4().hex[:5]
            self._create(f"{self._owner['metadata']['name']}-{self._revision}-{suffix}")

    def _say(self) -> None:
        num_ready = sum(is_ready(pod) for pod in self._active)
        is_done = len(self._new) == len(self._active) == self._wanted == num_ready
        progress = "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated"
        available = num_ready >= self._wanted
        conditions = [
            ("Available", str(available), "MinimumReplicasAvailable"),
            ("Progressing", "True", progress),
        ]
        self._publish(
            unavailableReplicas=max(0, self._wanted - num_ready),
            conditions=[{"type": t, "status": s, "reason": r} for t, s, r in conditions],
        )


class StatefulSetStep(_Step):
    """One look at a StatefulSet: one pod at a time, the first first, but the last first to end."""

    kind, label = STATEFUL_SET, REVISION

    def take(self) -> None:
        """Creates or deletes at most one pod, or all that are missing where they are parallel."""
        if self._ends():
            return
        by_number = {self._number(pod): pod for pod in self._pods}
        missing = [number for number in range(self._wanted) if number not in by_number]
        if self._spec.get("podManagementPolicy") == "Parallel":
            for number in missing:
                self._add(number)
        else:
            below = missing[0] if missing else self._wanted
            unsettled = [n for n in range(below) if not self._is_settled(by_number[n])]
            if missing and not unsettled:
                self._add(missing[0])
            missing += unsettled
        if not missing:
            self._shrink_or_update(by_number)
        self._say()

    def _shrink_or_update(self, by_number: dict[int, Object]) -> None:
        if any(is_ending(pod) for pod in self._pods):
            return
        surplus = [number for number in by_number if number >= self._wanted]
        if surplus:
            delete_pod(self._store, by_number[max(surplus)])
            return
        strategy = self._spec.get("updateStrategy", {})
        if strategy.get("type") == "OnDelete":
            return
        first = strategy.get("rollingUpdate", {}).get("partition", 0)
        for number in reversed(range(first, self._wanted)):
            pod = by_number[number]
            if pod["metadata"]["labels"][REVISION] != self._revision:
                delete_pod(self._store, pod)
                return
            if not is_ready(pod):
                return

    def _is_settled(self, pod: Object) -> bool:
        """True if the next pod may follow it; one of an older revision is replaced, not awaited."""
        is_old = pod["metadata"]["labels"][REVISION] != self._revision
        return not is_ending(pod) and (is_ready(pod) or is_old)

    def _name(self, number: int) -> str:
        return f"{self._owner['metadata']['name']}-{number}"

    def _number(self, pod: Object) -> int:
        return int(str(pod["metadata"]["name"]).rpartition("-")[2])

    def _add(self, number: int) -> None:
        name, namespace = self._name(number), self._owner["metadata"]["namespace"]
        volumes = list(self._spec["template"]["spec"].get("volumes", []))
        for claim in self._spec.get("volumeClaimTemplates", []):
            wanted = f"{claim['metadata']['name']}-{name}"
            if self._store.get(CLAIM, namespace, wanted) is None:
                about = {"name": wanted, "namespace": namespace}
                self._store.put(CLAIM, {"metadata": about, "spec": claim["spec"]})
            bound = {"persistentVolumeClaim": {"claimName": wanted}}
            volumes.append({"name": claim["metadata"]["name"], **bound})
        labels = {
            "statefulset.kubernetes.io/pod-name": name,
            "apps.kubernetes.io/pod-index": str(number),
        }
        subdomain = self._spec.get("serviceName", "")
        changes = {"hostname": name, "subdomain": subdomain, "volumes": volumes, "labels": labels}
        self._create(name, changes)

    def _say(self) -> None:
        is_done = len(self._new) == len(self._active) == self._wanted
        before = self._owner.get("status", {}).get("currentRevision", self._revision)
        current = self._revision if is_done else before
        num_current = len(self._new) if is_done else len(self._active) - len(self._new)
        self._publish(
            currentRevision=current, updateRevision=self._revision, currentReplicas=num_current
        )


def _share(limit: int | str, total: int, rounded: Any) -> int:
    """maxSurge or maxUnavailable as a number."""
    if isinstance(limit, int):
        return limit
    return int(rounded(total * int(limit.rstrip("%")) / 100))
