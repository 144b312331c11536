"""The objects that the server takes, by the API's own schemas and rules that no schema can say."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate

from tests.deploy.cluster.api.discovery import VERSION
from tests.deploy.cluster.api.kinds import Kind

# Else each object reads the schema of its kind, and a megabyte of definitions, once more.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

Object = dict[str, Any]
CUSTOM = ("monitoring.coreos.com", "keda.sh", "cert-manager.io", "gateway.networking.k8s.io")
_QUANTITY = re.compile(r"([0-9.]+)(m|Ki|Mi|Gi|Ti|k|M|G)?")
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_HANDLERS = ("grpc", "httpGet", "tcpSocket", "exec")
MAX_PORT = 65535


def problems(kind: Kind, obj: Object) -> list[str]:
    """Why a server would refuse the object; empty if it would not."""
    if kind.group in CUSTOM:
        return []
    sent = {name: value for name, value in obj.items() if name != "status"}
    try:
        kubernetes_validate.validate(sent, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        return [f"strict decoding error: {where}: {error.message}"]
    return list(_of_workload(kind, obj))


def quantity(text: object) -> float:
    """A quantity such as 500m or 2Gi, as a number."""
    match = _QUANTITY.fullmatch(str(text))
    if not match:
        raise ValueError(f"quantity {text!r}")
    return float(match[1]) * _UNITS[match[2] or ""]


def pod_spec(kind: Kind, obj: Object) -> Object | None:
    """The pod that an object makes, or is."""
    if kind.name == "Pod":
        return dict(obj["spec"])
    template = obj.get("spec", {}).get("template") if isinstance(obj.get("spec"), dict) else None
    return dict(template["spec"]) if isinstance(template, dict) and "spec" in template else None


def _of_workload(kind: Kind, obj: Object) -> Iterator[str]:
    spec = pod_spec(kind, obj)
    if spec is None:
        return
    if kind.name in ("Deployment", "StatefulSet"):
        wanted = obj["spec"]["selector"].get("matchLabels", {})
        labels = obj["spec"]["template"].get("metadata", {}).get("labels", {})
        if any(labels.get(name) != value for name, value in wanted.items()):
            yield "spec.template.metadata.labels: `selector` does not match template `labels`"
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    claims = obj["spec"].get("volumeClaimTemplates", [])
    volumes |= {claim["metadata"]["name"] for claim in claims}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for problem in _of_container(container, volumes):
            yield f"container {container['name']}: {problem}"


def _of_container(container: Object, volumes: set[str]) -> Iterator[str]:
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f'volumeMounts: Not found: "{mount["name"]}"'
    resources = container.get("resources", {})
    limits = resources.get("limits", {})
    for name, wanted in resources.get("requests", {}).items():
        limit = limits.get(name)
        if limit is not None and quantity(wanted) > quantity(limit):
            yield f"resources.requests {name} {wanted} > limit {limit}"
        if "/" in name and str(limit) != str(wanted):
            yield f"extended resource {name}: limit must be set and equal request"
    ports = {port.get("name") for port in container.get("ports", [])}
    for name in _PROBES:
        if name in container:
            yield from (f"{name}: {text}" for text in _of_probe(name, container[name], ports))


def _of_probe(name: str, probe: Object, ports: set[str]) -> Iterator[str]:
    handlers = [handler for handler in _HANDLERS if handler in probe]
    if len(handlers) != 1:
        yield "exactly one handler"
        return
    port = probe[handlers[0]].get("port")
    if isinstance(port, int) and not 1 <= port <= MAX_PORT:
        yield f"port {port} out of range"
    if isinstance(port, str) and port not in ports:
        yield f'no port named "{port}"'
    if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
        yield "successThreshold must be 1"
