"""Mistakes that a schema of Kubernetes lets pass and a cluster refuses, or that quietly do nothing.

`problems(objects, outside)` names each; `outside` are secrets and claims that the values name.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from tests.deploy.chart.quantities import amount
from tests.deploy.chart.rendering import Object, of_kind, pod_spec, pods

WORKLOADS = ("Deployment", "StatefulSet")
MAX_NAME, MAX_STATEFUL_NAME = 63, 52  # a StatefulSet appends a hash to its name, for a label


def problems(objects: list[Object], outside: Iterable[str] = ()) -> list[str]:
    """Problems of objects that belong together, each with the object's name."""
    found = [*_names(objects), *_services(objects), *_routes(objects), *_scaling(objects)]
    found += _monitors(objects)
    for owner in pods(objects):
        place = label(owner)
        found += [f"{place}: {text}" for text in _pod(owner, objects, set(outside))]
    for owner in of_kind(objects, *WORKLOADS):
        found += [f"{label(owner)}: {text}" for text in _workload(owner, objects)]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        if not selected(objects, budget["spec"]["selector"]["matchLabels"]):
            found.append(f"{label(budget)}: selects no pod")
    return found


def label(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def labels_of_pods(workload: Object) -> dict[str, str]:
    """The labels of the pods that a workload starts."""
    source = workload if workload["kind"] == "Pod" else workload["spec"]["template"]
    labels: dict[str, str] = source["metadata"]["labels"]
    return labels


def selected(objects: list[Object], selector: dict[str, str]) -> list[Object]:
    """The workloads whose pods a selector finds."""
    return [found for found in pods(objects) if selector.items() <= labels_of_pods(found).items()]


def _names(objects: list[Object]) -> Iterator[str]:
    seen = set()
    for found in objects:
        place, name = label(found), found["metadata"]["name"]
        if place in seen:
            yield f"{place}: twice"
        seen.add(place)
        if len(name) > (MAX_STATEFUL_NAME if found["kind"] == "StatefulSet" else MAX_NAME):
            yield f"{place}: the name is too long"


def _pod(owner: Object, objects: list[Object], outside: set[str]) -> Iterator[str]:
    spec = pod_spec(owner)
    names = {label(found) for found in objects}
    secrets = {n.partition("/")[2] for n in names if n.startswith("Secret/")} | outside
    secrets |= {c["spec"]["secretName"] for c in of_kind(objects, "Certificate")}
    account = spec.get("serviceAccountName")
    if account and f"ServiceAccount/{account}" not in names:
        yield f"service account {account} does not exist"
    volumes = _volumes(owner)
    if len(volumes) != len(set(volumes)):
        yield "a volume's name stands twice"
    mounted = set()
    for container in _containers(spec):
        mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
        yield from (f"container {container['name']}: {t}" for t in _container(container, volumes))
        for secret in _secrets_of(container):
            if secret not in secrets:
                yield f"container {container['name']}: secret {secret} does not exist"
    for volume in spec.get("volumes", ()):
        name = volume.get("secret", {}).get("secretName")
        if name and name not in secrets:
            yield f"volume {volume['name']}: secret {name} does not exist"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in outside:
            yield f"volume {volume['name']}: claim {claim} does not exist"
        if volume["name"] not in mounted:
            yield f"volume {volume['name']} is not mounted"


def _containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _volumes(owner: Object) -> list[str]:
    claims = owner["spec"].get("volumeClaimTemplates", ())
    names = [volume["name"] for volume in pod_spec(owner).get("volumes", ())]
    return names + [claim["metadata"]["name"] for claim in claims]


def _secrets_of(container: Object) -> Iterator[str]:
    for variable in container.get("env", ()):
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference:
            yield reference["name"]


def _container(container: Object, volumes: list[str]) -> Iterator[str]:
    mounts = container.get("volumeMounts", ())
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"mounts {mount['name']}, which is no volume"
    if len({mount["mountPath"] for mount in mounts}) < len(mounts):
        yield "mounts two volumes at one place"
    names = [variable["name"] for variable in container.get("env", ())]
    if len(names) != len(set(names)):
        yield "sets a variable twice"
    yield from _resources(container.get("resources", {}))
    ports = container.get("ports", ())
    for field in ("name", "containerPort"):
        values = [port[field] for port in ports]
        if len(values) != len(set(values)):
            yield f"has a {field} twice among its ports"
    known = {port["containerPort"] for port in ports}
    for number in known:
        if not 0 < number < 65536:
            yield f"port {number} is none"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(probe, {}).get("grpc", {}).get("port")
        if port is not None and port not in known:
            yield f"{probe} asks port {port}, which it does not have"


def _resources(resources: Object) -> Iterator[str]:
    limits = resources.get("limits", {})
    for name, wanted in resources.get("requests", {}).items():
        if name in limits and amount(wanted) > amount(limits[name]):
            yield f"requests {wanted} {name} and is limited to {limits[name]}"
    for name in {*limits, *resources.get("requests", {})}:
        counts = {str(part.get(name)) for part in (limits, resources.get("requests", {}))}
        if "/" in name and len(counts) > 1:
            yield f"requests another number of {name} than its limit"


def _workload(owner: Object, objects: list[Object]) -> Iterator[str]:
    spec = owner["spec"]
    if not spec["selector"]["matchLabels"].items() <= labels_of_pods(owner).items():
        yield "its selector does not find its own pods"
    if owner["kind"] == "StatefulSet":
        services = {found["metadata"]["name"] for found in of_kind(objects, "Service")}
        if spec["serviceName"] not in services:
            yield f"its service {spec['serviceName']} does not exist"
    container = pod_spec(owner)["containers"][0]
    drain = _option(container, "drain-timeout-s")
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if drain is not None and pod_spec(owner)["terminationGracePeriodSeconds"] < drain + sleep + 10:
        yield "its grace period ends before its drain"


def _option(container: Object, name: str) -> float | None:
    values = [a.partition("=")[2] for a in container["args"] if a.startswith(f"--{name}=")]
    return float(values[0]) if values else None


def ports_of(workload: Object) -> dict[str, int]:
    """The ports of a workload's containers, by name."""
    containers = pod_spec(workload)["containers"]
    return {p["name"]: p["containerPort"] for c in containers for p in c.get("ports", ())}


def _services(objects: list[Object]) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        place, targets = label(service), selected(objects, service["spec"]["selector"])
        if len(targets) != 1:
            yield f"{place}: leads to {len(targets)} workloads"
        for port in service["spec"]["ports"]:
            wanted = port["targetPort"]
            if not all(wanted in {**ports_of(t)} for t in targets):
                yield f"{place}: port {port['name']} leads to {wanted}, which no container has"
        if service["spec"].get("clusterIP") == "None" and any(
            port["port"] != ports_of(t).get(port["targetPort"])
            for port in service["spec"]["ports"]
            for t in targets
        ):
            yield f"{place}: is headless, and its ports are not the pods'"


def _routes(objects: list[Object]) -> Iterator[str]:
    services = {s["metadata"]["name"]: s["spec"]["ports"] for s in of_kind(objects, "Service")}
    for route in of_kind(objects, "Ingress", "HTTPRoute", "GRPCRoute"):
        for name, field, value in _backends(route):
            if value not in [port[field] for port in services.get(name, ())]:
                yield f"{label(route)}: leads to {name}:{value}, which does not exist"


def _backends(route: Object) -> Iterator[tuple[str, str, Any]]:
    for rule in route["spec"]["rules"]:
        for backend in rule.get("backendRefs", ()):
            yield backend["name"], "port", backend["port"]
        for path in rule.get("http", {}).get("paths", ()):
            service = path["backend"]["service"]
            yield service["name"], "name", service["port"]["name"]


def _scaling(objects: list[Object]) -> Iterator[str]:
    owners = {label(found): found for found in of_kind(objects, *WORKLOADS)}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        owner = owners.get(f"{target['kind']}/{target['name']}")
        if owner is None:
            yield f"{label(scaler)}: scales what does not exist"
        elif "replicas" in owner["spec"]:
            yield f"{label(scaler)}: an upgrade would reset the replicas of its target"


def _monitors(objects: list[Object]) -> Iterator[str]:
    for monitor in of_kind(objects, "PodMonitor", "ServiceMonitor"):
        spec, wanted = monitor["spec"], monitor["spec"]["selector"]["matchLabels"]
        if monitor["kind"] == "PodMonitor":
            ports = [set(ports_of(found)) for found in selected(objects, wanted)]
            endpoints = spec["podMetricsEndpoints"]
        else:
            services = of_kind(objects, "Service")
            found = [s for s in services if wanted.items() <= s["metadata"]["labels"].items()]
            ports = [{port["name"] for port in service["spec"]["ports"]} for service in found]
            endpoints = spec["endpoints"]
        if not ports:
            yield f"{label(monitor)}: selects nothing"
        for endpoint in endpoints:
            if any(endpoint["port"] not in names for names in ports):
                yield f"{label(monitor)}: scrapes port {endpoint['port']}, which is not there"
