"""The stand-in does with pods what a cluster does, or the chart's tests would show little."""

import time
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.cluster.api.kinds import POD
from tests.deploy.cluster.api.store import Object
from tests.deploy.cluster.endpoints import is_ready
from tests.deploy.cluster.standin import Client, StandIn
from tests.pace import patience

pytestmark = pytest.mark.slow
NAMESPACE = "default"
# Answers with what it knows of itself, on all addresses; says that it was asked to end.
SERVER = """
import http.server, json, os, signal, socket, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        try:
            open("/read-only", "w")
            root = "writable"
        except OSError as error:
            root = error.strerror
        try:
            found = socket.gethostbyname_ex(sys.argv[1])[2]
        except OSError:  # no pod of the name is ready yet
            found = []
        about = {"pid": os.getpid(), "uid": os.getuid(), "host": socket.gethostname(), "root": root,
                 "env": dict(os.environ), "found": found, "prepared": open("/work/prepared").read(),
                 "config": open("/config/words").read(), "secret": open("/secret/token").read()}
        body = json.dumps(about).encode()
        self.send_response(200); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler)
def ended(*_):
    print("asked to end", flush=True); time.sleep(float(os.environ["LINGER"])); os._exit(0)
signal.signal(signal.SIGTERM, ended)
server.serve_forever()
"""


def server(name: str, kind: str, **spec: Any) -> Object:
    """A workload of servers, with an init container, a ConfigMap and a Secret."""
    mounts = [
        {"name": "work", "mountPath": "/work"},
        {"name": "config", "mountPath": "/config"},
        {"name": "secret", "mountPath": "/secret", "readOnly": True},
    ]
    container = {
        "name": "server",
        "image": "pagewire/gateway:1",
        "command": ["python", "-c", SERVER],
        "args": ["$(OWN).default.svc.cluster.local"],
        "env": [
            {"name": "OWN", "value": name},
            {"name": "LINGER", "value": "0"},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "secrets", "key": "token"}},
            },
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": mounts,
    }
    return _workload(name, kind, container, mounts[:1], spec)


def _workload(
    name: str, kind: str, container: Object, mounts: list[Object], spec: Object
) -> Object:
    prepare = {
        "name": "prepare",
        "image": "pagewire/gateway:1",
        "command": ["python", "-c", "open('/work/prepared', 'w').write('yes')"],
        "volumeMounts": mounts,
    }
    labels = {"app": name}
    pod = {
        "terminationGracePeriodSeconds": 3,
        "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
        "initContainers": [prepare],
        "containers": [container],
        "volumes": [
            {"name": "work", "emptyDir": {}},
            {"name": "config", "configMap": {"name": "words"}},
            {"name": "secret", "secret": {"secretName": "secrets", "defaultMode": 0o440}},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
            **spec,
        },
    }


def service(name: str, **spec: Any) -> Object:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": ports, **spec},
    }


@pytest.fixture(scope="module")
def apply(cluster: StandIn, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("manifests")

    def applied(*objects: Object, ok: bool = True) -> str:
        path = folder / "objects.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        line = ("apply", "--server-side", "--validate=false", "-n", NAMESPACE, "-f", str(path))
        ran = client.kubectl(*line)
        assert (ran.returncode == 0) is ok, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    applied(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "words"},
            "data": {"words": "some words"},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "secrets"},
            "stringData": {"token": "hidden"},
        },
    )
    return applied


def pods_of(cluster: StandIn, name: str) -> list[Object]:
    return [p for p in cluster.pods(NAMESPACE) if p["metadata"]["labels"]["app"] == name]


def wait_until_ready(cluster: StandIn, name: str, count: int) -> list[Object]:
    def look() -> list[Object] | None:
        pods = pods_of(cluster, name)
        return pods if len(pods) == count and all(map(is_ready, pods)) else None

    return cluster.wait_for(look, f"{count} ready pods of {name}")


def ask(cluster: StandIn, name: str) -> dict[str, Any]:
    address = cluster.service_address(NAMESPACE, name)
    found: dict[str, Any] = httpx.get(f"http://{address}/", timeout=patience(10)).json()
    return found


def test_a_pod_is_a_process_with_what_its_manifest_says(cluster: StandIn, apply: Any) -> None:
    apply(service("one"), server("one", "Deployment"))
    (pod,) = wait_until_ready(cluster, "one", 1)
    about = ask(cluster, "one")
    assert (about["pid"], about["uid"]) == (1, 10001)
    assert about["root"] == "Read-only file system"
    assert about["host"] == pod["metadata"]["name"]
    assert (about["prepared"], about["config"], about["secret"]) == ("yes", "some words", "hidden")
    assert about["env"]["ADDRESS"] == pod["status"]["podIP"]
    assert about["env"]["TOKEN"] == "hidden" and "PYTEST_CURRENT_TEST" not in about["env"]
    assert about["found"] == [cluster.service_address(NAMESPACE, "one")]


def test_a_rolling_update_never_leaves_the_service_without_a_pod(
    cluster: StandIn, apply: Any
) -> None:
    limits = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    deployment = server("rolled", "Deployment", replicas=2, strategy=limits)
    apply(service("rolled"), deployment)
    before = {p["metadata"]["name"] for p in wait_until_ready(cluster, "rolled", 2)}
    deployment["spec"]["template"]["metadata"]["annotations"] = {"again": "1"}
    apply(deployment)
    most = 0

    def is_done() -> bool:
        nonlocal most
        try:
            ask(cluster, "rolled")
        # A pod that ends takes along a call that has reached it.
        except (httpx.ReadError, httpx.RemoteProtocolError):
            ask(cluster, "rolled")  # fails where no other pod answers
        pods = pods_of(cluster, "rolled")
        active = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
        most = max(most, len(active))
        names = {p["metadata"]["name"] for p in pods}
        return not names & before and len(pods) == 2 and all(map(is_ready, pods))

    cluster.wait_for(is_done, "the update")
    assert most == 3


def test_a_stateful_sets_pods_come_in_order_go_in_reverse_and_have_names(
    cluster: StandIn, apply: Any
) -> None:
    stateful = server("many", "StatefulSet", replicas=3, serviceName="many")
    apply(service("many", clusterIP="None"), stateful)
    pods = wait_until_ready(cluster, "many", 3)
    assert [p["metadata"]["name"] for p in pods] == ["many-0", "many-1", "many-2"]
    began = [p["metadata"]["creationTimestamp"] for p in pods]
    assert began == sorted(began)
    found = httpx.get(f"http://{pods[0]['status']['podIP']}:8000/").json()["found"]
    assert sorted(found) == sorted(p["status"]["podIP"] for p in pods)
    stateful["spec"]["replicas"] = 1
    apply(stateful)
    gone: list[str] = []

    def is_done() -> bool:
        left = {p["metadata"]["name"] for p in pods_of(cluster, "many")}
        gone.extend(n for n in ("many-2", "many-1") if n not in left and n not in gone)
        return left == {"many-0"}

    cluster.wait_for(is_done, "fewer pods")
    assert gone == ["many-2", "many-1"]


def test_a_container_that_lingers_is_killed_when_its_grace_is_over(
    cluster: StandIn, apply: Any, client: Client
) -> None:
    lingering = server("lingering", "Deployment")
    container = lingering["spec"]["template"]["spec"]["containers"][0]
    container["env"][1]["value"] = "1000"
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": 1}}}
    apply(lingering)
    (pod,) = wait_until_ready(cluster, "lingering", 1)
    began_s = time.monotonic()
    name = pod["metadata"]["name"]
    assert client.kubectl("delete", "deployment", "lingering", "-n", NAMESPACE).returncode == 0
    cluster.wait_for(lambda: not pods_of(cluster, "lingering"), "end of the pod")
    assert time.monotonic() - began_s >= 3  # terminationGracePeriodSeconds; preStop is part of it
    assert "asked to end" in cluster.kubelet.logs(NAMESPACE, name, "server")


def test_a_failed_liveness_probe_starts_the_container_anew(cluster: StandIn, apply: Any) -> None:
    failing = server("failing", "Deployment")
    probe = {"exec": {"command": ["python", "-c", "raise SystemExit(1)"]}, "periodSeconds": 1}
    failing["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] = probe
    apply(failing)

    def look() -> bool:
        statuses = [
            p.get("status", {}).get("containerStatuses") for p in pods_of(cluster, "failing")
        ]
        return any(s and s[0]["restartCount"] > 0 for s in statuses)

    cluster.wait_for(look, "restart")
    apply(failing | {"spec": failing["spec"] | {"replicas": 0}})
    cluster.wait_for(lambda: not pods_of(cluster, "failing"), "end of the pods")


def test_an_image_without_the_program_and_an_unknown_image_say_so(
    cluster: StandIn, apply: Any
) -> None:
    shell, unknown = server("shell", "Deployment"), server("unknown", "Deployment")
    shell["spec"]["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000"]
    unknown["spec"]["template"]["spec"]["containers"][0]["image"] = "nginx:1"
    apply(shell, unknown)

    def reason(name: str) -> str:
        for pod in pods_of(cluster, name):
            for each in pod.get("status", {}).get("containerStatuses", []):
                return str(each["state"].get("waiting", {}).get("reason", ""))
        return ""

    cluster.wait_for(lambda: reason("unknown") == "ErrImagePull", "refusal of the image")
    cluster.wait_for(lambda: reason("shell") == "CrashLoopBackOff", "failure of the shell")


def test_what_a_server_refuses_is_refused_by_name(apply: Any) -> None:
    wrong = server("wrong", "Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"] = "web"
    assert 'readinessProbe: no port named "web"' in apply(wrong, ok=False)
    wrong = server("wrong", "Deployment", replica=2)
    assert "replica" in apply(wrong, ok=False)


def test_without_its_objects_no_process_of_a_pod_is_left(
    cluster: StandIn, client: Client, apply: Any
) -> None:
    apply(server("last", "Deployment"))
    wait_until_ready(cluster, "last", 1)
    assert cluster.processes()
    for kind in ("deployments", "statefulsets"):
        client.kubectl("delete", kind, "--all", "-n", NAMESPACE)
    cluster.wait_for(lambda: not cluster.store.all_of(POD), "end of all pods")
    cluster.wait_for(lambda: not cluster.processes(), "end of all processes")
