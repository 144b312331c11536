"""Volumes of a pod as folders of this machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.cluster.api.kinds import CLAIM, CONFIG_MAP, SECRET
from tests.deploy.cluster.api.store import Object, Store
from tests.deploy.cluster.node.fields import content_of, field

_FILE_MODE = 0o644


class NotYet(Exception):
    """Raised when a thing that a pod needs is not there; a kubelet tries again."""


class Volumes:
    """The volumes of one pod, below its folder."""

    def __init__(self, store: Store, claims: Path, folder: Path) -> None:
        self._store, self._claims, self._folder = store, claims, folder

    def make(self, pod: Object) -> dict[str, Path]:
        """All of them by name. Raises NotYet for a ConfigMap, Secret or claim that is missing."""
        context = pod["spec"].get("securityContext", {})
        group = context.get("fsGroup")
        return {
            volume["name"]: self._one(pod, volume, group)
            for volume in pod["spec"].get("volumes", [])
        }

    def _one(self, pod: Object, volume: Object, group: int | None) -> Path:
        namespace = pod["metadata"]["namespace"]
        folder = self._folder / "volumes" / str(volume["name"])
        if host := volume.get("hostPath"):
            return Path(host["path"])
        if claim := volume.get("persistentVolumeClaim"):
            return self._claim(namespace, claim["claimName"], group)
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)
            return folder
        for name, content, mode in self._files(pod, volume):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if group is not None:  # the group may read what the owner may
                shutil.chown(path, group=group)
                mode |= (mode & 0o400) >> 3
            path.chmod(mode)
        return folder

    def _claim(self, namespace: str, name: str, group: int | None) -> Path:
        if self._store.get(CLAIM, namespace, name) is None:
            raise NotYet(f'persistentvolumeclaim "{name}" not found')
        folder = self._claims / namespace / name
        if not folder.exists():
            folder.mkdir(parents=True)
            if group is not None:
                shutil.chown(folder, group=group)
                folder.chmod(0o2775)
        return folder

    def _files(self, pod: Object, volume: Object) -> Iterator[tuple[str, bytes, int]]:
        """Names, contents and modes of the files of a volume that is made of objects."""
        projected = volume.get("projected")
        sources = projected["sources"] if projected else [volume]
        for source in sources:
            default = _FILE_MODE
            for each in (projected, source.get("secret"), source.get("configMap")):
                default = (each or {}).get("defaultMode", default)
            for name, (content, mode) in self._source(pod, source).items():
                yield name, content, default if mode is None else mode

    def _source(self, pod: Object, source: Object) -> dict[str, tuple[bytes, int | None]]:
        namespace = pod["metadata"]["namespace"]
        if secret := source.get("secret"):
            name = secret.get("secretName") or secret["name"]
            return _chosen(self._content(SECRET, namespace, name, secret), secret)
        if config := source.get("configMap"):
            return _chosen(self._content(CONFIG_MAP, namespace, config["name"], config), config)
        if downward := source.get("downwardAPI"):
            items = downward.get("items", [])
            return {e["path"]: (field(pod, e["fieldRef"]).encode(), e.get("mode")) for e in items}
        raise NotYet(f"a volume of a kind that this cluster has not: {', '.join(source)}")

    def _content(self, kind: Any, namespace: str, name: str, source: Object) -> dict[str, bytes]:
        found = self._store.get(kind, namespace, name)
        if found is None:
            if source.get("optional"):
                return {}
            raise NotYet(f'{kind.name.lower()} "{name}" not found')
        return content_of(found)


def _chosen(content: dict[str, bytes], source: Object) -> dict[str, tuple[bytes, int | None]]:
    if "items" not in source:
        return {name: (data, None) for name, data in content.items()}
    try:
        return {each["path"]: (content[each["key"]], each.get("mode")) for each in source["items"]}
    except KeyError as error:
        raise NotYet(f"references non-existent key: {error}") from None
