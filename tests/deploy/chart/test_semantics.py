"""The rendered objects fit together, and the checker of that finds each planted mistake."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.chart.rendering import SETS, Object, of_kind, pod_spec, rendered
from tests.deploy.chart.semantics import problems

# Secrets and claims that users bring, by the set of values that names them.
OUTSIDE = {
    "tensor-parallel": ["weights"],
    "tls-secrets": ["gateway-tls", "scheduler-tls", "worker-tls", "public-tls"],
    "hub-token": ["hub"],
    "s3": ["s3", "models"],
    "api-keys": ["keys", "test-key"],
    "names": ["my-token"],
}


@pytest.mark.parametrize("name", SETS)
def test_all_fits_together(name: str) -> None:
    assert problems(rendered(name), OUTSIDE.get(name, ())) == []


def the(objects: list[Object], kind: str, suffix: str) -> Any:
    """The spec of an object of this kind whose name ends so."""
    (found,) = (
        o for o in of_kind(objects, kind) if o["metadata"]["name"].endswith(suffix)
    )  # fmt: skip
    return found["spec"]


def gateway(objects: list[Object]) -> Any:
    """The container of the gateway."""
    (found,) = of_kind(objects, "Deployment")
    return pod_spec(found)["containers"][0]


MISTAKES: list[tuple[str, Callable[[list[Object]], object], str]] = [
    ("defaults", lambda o: gateway(o)["ports"][0].update(containerPort=500520), "500520 is none"),
    ("defaults", lambda o: gateway(o)["ports"][0].update(containerPort=9464), "twice"),
    ("defaults", lambda o: gateway(o)["ports"].pop(2), "livenessProbe asks port 9463"),
    ("defaults", lambda o: gateway(o)["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
     "mounts x, which is no volume"),
    ("defaults", lambda o: gateway(o)["volumeMounts"][0].update(mountPath="/cache"),
     "at one place"),
    ("defaults", lambda o: gateway(o)["volumeMounts"].pop(1), "is not mounted"),
    ("defaults", lambda o: gateway(o)["resources"]["limits"].update(memory="1000Mi"), "limited to"),
    ("defaults", lambda o: gateway(o)["env"].append({"name": "HOME"}), "sets a variable twice"),
    ("defaults", lambda o: the(o, "Deployment", "")["template"]["spec"].update(
        terminationGracePeriodSeconds=600), "ends before its drain"),
    ("defaults", lambda o: the(o, "Deployment", "")["template"]["spec"].update(
        serviceAccountName="root"), "service account root does not exist"),
    ("defaults", lambda o: the(o, "Deployment", "")["selector"]["matchLabels"].update(a="b"),
     "does not find its own pods"),
    ("defaults", lambda o: the(o, "StatefulSet", "main").update(serviceName="x"),
     "its service x does not exist"),
    ("defaults", lambda o: the(o, "Service", "gateway")["selector"].update(a="b"),
     "leads to 0 workloads"),
    ("defaults", lambda o: the(o, "Service", "gateway")["selector"].pop(
        "app.kubernetes.io/component"), "leads to 4 workloads"),
    ("defaults", lambda o: the(o, "Service", "gateway")["ports"][0].update(targetPort="web"),
     "which no container has"),
    ("defaults", lambda o: the(o, "Service", "main")["ports"][0].update(port=80), "is headless"),
    ("defaults", lambda o: the(o, "PodDisruptionBudget", "main")["selector"]["matchLabels"].update(
        a="b"), "selects no pod"),
    ("defaults", lambda o: o.append(o[0]), "twice"),
    ("api-keys", lambda o: o.remove(of_kind(o, "Secret")[0]), "peers does not exist"),
    ("ingress", lambda o: the(o, "Ingress", "http")["rules"][0]["http"]["paths"][0]["backend"][
        "service"]["port"].update(name="web"), "gateway:web, which does not exist"),
    ("gateway-api", lambda o: the(o, "HTTPRoute", "")["rules"][0]["backendRefs"][0].update(
        port=8000), "gateway:8000, which does not exist"),
    ("hpa", lambda o: the(o, "StatefulSet", "main").update(replicas=1), "reset the replicas"),
    ("keda", lambda o: the(o, "ScaledObject", "main")["scaleTargetRef"].update(name="x"),
     "scales what does not exist"),
    ("monitoring", lambda o: the(o, "PodMonitor", "worker")["podMetricsEndpoints"][0].update(
        port="x"), "scrapes port x"),
    ("service-monitor", lambda o: the(o, "ServiceMonitor", "worker")["selector"][
        "matchLabels"].update(a="b"), "selects nothing"),
    ("tensor-parallel", lambda o: pod_spec(of_kind(o, "StatefulSet")[1])["containers"][0][
        "resources"]["limits"].update({"nvidia.com/gpu": 4}), "another number of nvidia.com/gpu"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plant", "says"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_a_planted_mistake_is_named(
    name: str, plant: Callable[[list[Object]], object], says: str
) -> None:
    objects = rendered(name)
    plant(objects)
    assert any(says in text for text in problems(objects, OUTSIDE.get(name, ())))
