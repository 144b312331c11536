"""All objects of the stand-in cluster, and what happened to them, in order.

An object that is in the store is never changed, only replaced.
"""

import copy
import datetime
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy.cluster.api.kinds import KINDS, NAMESPACE, Kind

Object = dict[str, Any]
Key = tuple[Kind, str, str]  # kind, namespace, name


def now() -> str:
    """The time, as objects have it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch."""

    version: int
    what: str  # ADDED, MODIFIED, DELETED
    key: Key
    obj: Object


class Store:
    """Objects by key; thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._changes: list[Change] = []
        self._version = 100
        self.changed = threading.Condition(threading.RLock())
        for name in ("default", "kube-system"):
            self.put(NAMESPACE, {"metadata": {"name": name}, "status": {"phase": "Active"}})

    @property
    def version(self) -> int:
        """That of the last change."""
        return self._version

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object; the caller must not change it."""
        return self._objects.get((kind, namespace, name))

    def all_of(self, kind: Kind, namespace: str = "") -> list[Object]:
        """All objects of a kind, of one namespace or of all; the caller must not change them."""
        with self.changed:
            return [
                obj
                for (of, within, _), obj in self._objects.items()
                if of == kind and namespace in ("", within)
            ]

    def put(self, kind: Kind, obj: Object) -> Object:
        """Adds or replaces an object; one that stays as it was is no change."""
        obj = {"apiVersion": kind.api_version, "kind": kind.name, **copy.deepcopy(obj)}
        about = obj["metadata"]
        with self.changed:
            key = (kind, about.get("namespace", ""), about["name"])
            old = self._objects.get(key)
            self._complete(obj, old)
            if old == obj:
                return obj
            self._note("ADDED" if old is None else "MODIFIED", key, obj)
            self._objects[key] = obj
            return obj

    def update(self, kind: Kind, obj: Object, change: Callable[[Object], None]) -> Object | None:
        """Changes the object that has this one's name and uid; None if there is none any more."""
        about = obj["metadata"]
        with self.changed:
            current = self.get(kind, about.get("namespace", ""), about["name"])
            if current is None or current["metadata"]["uid"] != about["uid"]:
                return None
            changed = copy.deepcopy(current)
            change(changed)
            return self.put(kind, changed)

    def remove(self, kind: Kind, obj: Object) -> None:
        """Removes the object that has this one's name and uid."""
        about = obj["metadata"]
        key = (kind, about.get("namespace", ""), about["name"])
        with self.changed:
            current = self._objects.get(key)
            if current is not None and current["metadata"]["uid"] == about["uid"]:
                gone = copy.deepcopy(current)
                self._note("DELETED", key, gone)
                del self._objects[key]

    def since(self, version: int) -> list[Change]:
        """The events after a version."""
        with self.changed:
            return [change for change in self._changes if change.version > version]

    def wait(self, version: int, timeout_s: float) -> int:
        """Waits for a change after a version; returns the version that is current then."""
        with self.changed:
            if self._version <= version:
                self.changed.wait(timeout_s)
            return self._version

    def _complete(self, obj: Object, old: Object | None) -> None:
        about = obj["metadata"]
        about.pop("managedFields", None)
        before: Object = {} if old is None else old["metadata"]
        about["uid"] = before.get("uid") or str(uuid.uuid4())
        about["creationTimestamp"] = before.get("creationTimestamp") or now()
        generation = before.get("generation", 0)
        is_new = old is None or old.get("spec") != obj.get("spec")
        about["generation"] = generation + 1 if is_new else generation
        about["resourceVersion"] = before.get("resourceVersion", "0")

    def _note(self, what: str, key: Key, obj: Object) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append(Change(self._version, what, key, obj))
        self.changed.notify_all()


def owned(objects: list[Object], owner: Object) -> Iterator[Object]:
    """The objects that an owner made."""
    uid = owner["metadata"]["uid"]
    for obj in objects:
        if any(each["uid"] == uid for each in obj["metadata"].get("ownerReferences", [])):
            yield obj


def is_ending(obj: Object) -> bool:
    """True if it was deleted, and something of it is left."""
    return "deletionTimestamp" in obj["metadata"]


def kinds_of(group: str, version: str) -> list[Kind]:
    """All kinds of one API."""
    return [kind for kind in KINDS if (kind.group, kind.version) == (group, version)]
