"""Variables of a container: given values, fields of its pod, keys of Secrets and ConfigMaps."""

import base64
import re
from typing import Any

from tests.deploy.cluster.api.kinds import CONFIG_MAP, SECRET
from tests.deploy.cluster.api.store import Object, Store

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class Missing(Exception):
    """A variable's source is not there; a kubelet tries again."""


def field(pod: Object, reference: Object) -> str:
    """The value of a fieldRef."""
    path = reference["fieldPath"]
    if match := _KEYED.fullmatch(path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    found: Any = pod
    for part in path.split("."):
        found = found.get(part, {})
    return str(found or "")


def variables(
    store: Store, pod: Object, container: Object, known: dict[str, str]
) -> dict[str, str]:
    """The container's variables over those of its image. Raises Missing."""
    found = dict(known)
    namespace = pod["metadata"]["namespace"]
    for source in container.get("envFrom", []):
        found |= {
            source.get("prefix", "") + name: data
            for name, data in _all(store, namespace, source).items()
        }
    for each in container.get("env", []):
        if "value" in each or "valueFrom" not in each:
            found[each["name"]] = expand(str(each.get("value", "")), found)
        elif (value := _from(store, pod, each["valueFrom"])) is not None:
            found[each["name"]] = value
    return found


def expand(text: str, known: dict[str, str]) -> str:
    """The text with $(NAME) replaced; what has no value stays, and $$ is $."""

    def value(match: "re.Match[str]") -> str:
        return "$" if match[1] == "$" else known.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def content_of(obj: Object) -> dict[str, bytes]:
    """The content of a ConfigMap or Secret."""
    if obj["kind"] == "Secret":
        found = {name: base64.b64decode(text) for name, text in (obj.get("data") or {}).items()}
        return found | {n: t.encode() for n, t in (obj.get("stringData") or {}).items()}
    binary = {n: base64.b64decode(text) for n, text in (obj.get("binaryData") or {}).items()}
    return binary | {name: text.encode() for name, text in (obj.get("data") or {}).items()}


def _from(store: Store, pod: Object, source: Object) -> str | None:
    if reference := source.get("fieldRef"):
        return field(pod, reference)
    if "resourceFieldRef" in source:
        return "0"  # resources are not limited here
    namespace = pod["metadata"]["namespace"]
    for name, kind in (("secretKeyRef", SECRET), ("configMapKeyRef", CONFIG_MAP)):
        if reference := source.get(name):
            content = _content(store, kind, namespace, reference)
            if reference["key"] in content:
                return content[reference["key"]]
            if reference.get("optional"):
                return None
            raise Missing(f"couldn't find key {reference['key']} in {reference['name']}")
    raise Missing(f"a source of a kind that this cluster has not: {', '.join(source)}")


def _all(store: Store, namespace: str, source: Object) -> dict[str, str]:
    for name, kind in (("secretRef", SECRET), ("configMapRef", CONFIG_MAP)):
        if reference := source.get(name):
            return _content(store, kind, namespace, reference)
    return {}


def _content(store: Store, kind: Any, namespace: str, reference: Object) -> dict[str, str]:
    found = store.get(kind, namespace, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise Missing(f'{kind.name.lower()} "{reference["name"]}" not found')
    return {name: data.decode() for name, data in content_of(found).items()}
