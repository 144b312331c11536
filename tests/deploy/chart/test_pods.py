"""Every pod is restricted, without a token of the cluster, sized, probed, ended in order."""

from collections.abc import Iterator

import pytest
import yaml

from tests.deploy.chart.quantities import amount
from tests.deploy.chart.rendering import (
    SETS,
    Object,
    helm_template,
    of_kind,
    pod_spec,
    pods,
    rendered,
)

# The volumes that the restricted Pod Security Standard allows.
RESTRICTED = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "csi"}
CONTEXT = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def violations(spec: Object) -> Iterator[str]:
    """Violations of the restricted standard and of this product's own rules by a pod."""
    context = spec["securityContext"]
    if not context.get("runAsNonRoot") or context.get("runAsUser") in (None, 0):
        yield "may run as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "has no seccomp profile"
    if {"hostNetwork", "hostPID", "hostIPC"} & spec.keys():
        yield "shares the host's namespaces"
    if spec["automountServiceAccountToken"] is not False or spec["enableServiceLinks"] is not False:
        yield "has a token or the variables of Services"
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= RESTRICTED:
            yield f"has a volume that is not allowed: {volume}"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"may fill the node through {volume['name']}"
    for container in containers(spec):
        own = container["securityContext"]
        if set(own) != CONTEXT or own["allowPrivilegeEscalation"] is not False:
            yield f"{container['name']} may gain privileges"
        if own["capabilities"] != {"drop": ["ALL"]}:
            yield f"{container['name']} has capabilities"
        if own["readOnlyRootFilesystem"] is not True:
            yield f"{container['name']} writes into its image"
        if "memory" not in container["resources"].get("limits", {}):
            yield f"{container['name']} has no limit of memory"
        if "cpu" not in container["resources"].get("requests", {}):
            yield f"{container['name']} requests no CPU"


@pytest.mark.parametrize("name", SETS)
def test_pods_are_restricted(name: str) -> None:
    found = {text for owner in pods(rendered(name)) for text in violations(pod_spec(owner))}
    asked_for = {
        "tensor-parallel": {"worker writes into its image"},  # worker.readOnlyRootFilesystem
        "volume": {
            "has a volume that is not allowed: {'name': 'model', 'hostPath': "
            "{'path': '/data/models', 'type': 'Directory'}}"
        },
    }
    assert found == asked_for.get(name, set())


@pytest.mark.parametrize("name", SETS)
def test_services_are_probed_on_the_plain_port(name: str) -> None:
    for owner in of_kind(rendered(name), "Deployment", "StatefulSet"):
        (container,) = pod_spec(owner)["containers"]
        assert container["livenessProbe"]["grpc"] == {"port": 9463, "service": "liveness"}
        # A scheduler that stands by is as it should be: an upgrade must not wait for it to serve.
        is_one_of_two = owner["metadata"]["name"].endswith("-scheduler") and name == "standby"
        service = {"service": "ready-to-serve"} if is_one_of_two else {}
        assert container["readinessProbe"]["grpc"] == {"port": 9463} | service
        patience_s = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"][
            "failureThreshold"
        ]  # fmt: skip
        assert patience_s >= 60, "no pause of a busy process ends it"


def startup_s(name: str, group: str) -> int:
    for owner in of_kind(rendered(name), "StatefulSet"):
        if owner["metadata"]["name"].endswith(f"-worker-{group}"):
            probe = pod_spec(owner)["containers"][0]["startupProbe"]
            return int(probe["periodSeconds"] * probe["failureThreshold"])
    raise AssertionError(group)


def test_a_worker_may_take_as_long_to_start_as_its_model_loads() -> None:
    assert startup_s("defaults", "main") == 1800
    assert startup_s("tensor-parallel", "main") == 3600


def grace(name: str, kind: str, suffix: str) -> tuple[int, Object]:
    (owner,) = (o for o in of_kind(rendered(name), kind) if o["metadata"]["name"].endswith(suffix))
    spec = pod_spec(owner)
    return spec["terminationGracePeriodSeconds"], spec["containers"][0]


def test_no_pod_is_killed_while_the_longest_answer_runs() -> None:
    for name, longest_s in (("defaults", 600), ("ingress", 1800)):
        for kind, suffix in (("Deployment", "gateway"), ("StatefulSet", "main")):
            seconds, container = grace(name, kind, suffix)
            sleep_s = (
                container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            )
            assert f"--drain-timeout-s={longest_s}" in container["args"]
            assert seconds >= longest_s + sleep_s + 10


def test_the_next_scheduler_is_there_before_gateways_lose_patience() -> None:
    """They wait for it: it may have to be pulled on another node. The old one ends at once."""
    _, gateway = grace("defaults", "Deployment", "gateway")
    assert "--scheduler-timeout-s=120" in gateway["args"]
    _, container = grace("defaults", "StatefulSet", "scheduler")
    assert "--drain-timeout-s=2" in container["args"]
    assert "lifecycle" not in container


def test_a_gateway_stays_in_its_service_while_the_scheduler_is_replaced() -> None:
    _, container = grace("defaults", "Deployment", "gateway")
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) >= 30


def test_a_worker_whose_probe_is_late_keeps_its_address() -> None:
    for service in of_kind(rendered("groups"), "Service"):
        if "-worker-" in service["metadata"]["name"]:
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_second_scheduler_stands_by_and_gateways_know_both() -> None:
    found = {(o["kind"], o["metadata"]["name"]): o for o in rendered("standby")}
    scheduler = found["StatefulSet", "demo-pagewire-scheduler"]
    assert scheduler["spec"]["replicas"] == 2
    spec = pod_spec(scheduler)
    assert "--standby-delay-s=0.5" in spec["containers"][0]["args"]
    spread = {each["topologyKey"] for each in spec["topologySpreadConstraints"]}
    assert "kubernetes.io/hostname" in spread
    both = found["Service", "demo-pagewire-schedulers"]["spec"]
    assert both["clusterIP"] == "None" and both["publishNotReadyAddresses"] is True
    assert both["selector"] == scheduler["spec"]["selector"]["matchLabels"]
    args = pod_spec(found["Deployment", "demo-pagewire-gateway"])["containers"][0]["args"]
    name = "demo-pagewire-schedulers.llm.svc.cluster.local"
    assert next(a for a in args if a.startswith("--scheduler")) == f"--scheduler-dns={name}:50052"
    assert name in found["Certificate", "demo-pagewire-scheduler"]["spec"]["dnsNames"]
    assert found["PodDisruptionBudget", "demo-pagewire-scheduler"]["spec"]["maxUnavailable"] == 1


def test_without_a_standby_there_are_never_two_schedulers() -> None:
    for name in set(SETS) - {"standby"}:
        (found,) = (
            o
            for o in of_kind(rendered(name), "StatefulSet", "Deployment")
            if o["metadata"]["name"].endswith("-scheduler")
        )
        assert (found["kind"], found["spec"]["replicas"]) == ("StatefulSet", 1)
        services = [
            s for s in of_kind(rendered(name), "Service")
            if s["metadata"]["name"] == found["metadata"]["name"]
        ]  # fmt: skip
        assert services[0]["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("tier", ["gateway", "scheduler", "worker"])
def test_a_variable_of_a_tier_is_in_its_pods_alone(tier: str) -> None:
    """Numbers and words with commas arrive as they were written."""
    done = helm_template(
        *("--set", f"{tier}.env.NCCL_DEBUG=INFO", "--set", f"{tier}.env.NCCL_TIMEOUT=18000000"),
        *("--set-string", f"{tier}.env.NCCL_P2P_DISABLE=1", "--set", f"{tier}.env.ON=true"),
    )
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    holders = []
    for owner in of_kind(objects, "StatefulSet", "Deployment"):
        for container in containers(pod_spec(owner)):
            found = {each["name"]: each.get("value") for each in container.get("env", ())}
            if "NCCL_DEBUG" in found:
                holders.append(owner["metadata"]["labels"]["app.kubernetes.io/component"])
                assert found["NCCL_DEBUG"] == "INFO"
                assert found["NCCL_TIMEOUT"] == "18000000"
                assert (found["NCCL_P2P_DISABLE"], found["ON"]) == ("1", "true")
    assert set(holders) == {tier}


def test_gpus_are_as_many_as_ranks_and_devices_of_their_group() -> None:
    for name, group, resource, ranks in (
        ("tensor-parallel", "main", "nvidia.com/gpu", 8),
        ("groups", "mig", "nvidia.com/mig-3g.40gb", 1),
    ):
        _, container = grace(name, "StatefulSet", group)
        assert container["resources"]["limits"][resource] == ranks
        assert f"--tensor-parallel-size={ranks}" in container["args"]
        assert "--device=cuda" in container["args"]
        assert container["image"].startswith("pagewire/worker-cuda:")
    _, container = grace("groups", "StatefulSet", "cpu")
    assert set(container["resources"]["limits"]) == {"memory"}
    assert container["image"].startswith("pagewire/worker-cpu:")


def test_shared_memory_is_in_memory_and_within_the_limit() -> None:
    for owner in of_kind(rendered("tensor-parallel"), "StatefulSet"):
        for volume in pod_spec(owner)["volumes"]:
            if volume["name"] == "shm":
                assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
                limit = pod_spec(owner)["containers"][0]["resources"]["limits"]["memory"]
                assert amount("16Gi") < amount(limit)


def test_a_group_has_its_own_values_and_those_of_all() -> None:
    _, h200 = grace("groups", "StatefulSet", "h200")
    _, mig = grace("groups", "StatefulSet", "mig")
    assert "--max-num-seqs=64" in mig["args"] and "--max-num-seqs=64" not in h200["args"]
    (scheduler,) = (
        pod_spec(o)["containers"][0]
        for o in of_kind(rendered("groups"), "StatefulSet")
        if o["metadata"]["name"].endswith("-scheduler")
    )
    hosts = [word for word in scheduler["args"] if word.startswith("--worker-dns=")]
    assert hosts == [
        f"--worker-dns=demo-pagewire-worker-{group}.llm.svc.cluster.local:50053"
        for group in ("h200", "mig", "cpu")
    ]


def test_large_numbers_stay_numbers() -> None:
    _, container = grace("tensor-parallel", "StatefulSet", "main")
    assert "--max-num-batched-tokens=1000000" in container["args"]
    assert "--gpu-memory-utilization=0.95" in container["args"]


def test_without_identity_services_say_so() -> None:
    for suffix in ("scheduler", "main"):
        _, container = grace("mtls", "StatefulSet", suffix)
        assert "--tls-client-ca=/etc/pagewire/tls/ca.crt" in container["args"]
        assert "--insecure" not in container["args"]
        assert not any(word.startswith("--peer-token-file") for word in container["args"])


def test_files_of_prompts_lie_on_a_claim_of_the_pod_or_end_with_it() -> None:
    groups = {
        owner["metadata"]["name"]: owner for owner in of_kind(rendered("groups"), "StatefulSet")
    }
    options, claims, volumes = {}, {}, {}
    for name, owner in groups.items():
        spec, group = pod_spec(owner), name.rsplit("-", 1)[-1]
        (container,) = spec["containers"]
        found = [each for each in container["args"] if each.startswith("--disk-tier")]
        options[group] = found
        mounts = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "kv"]
        assert mounts == ["/kv"] * len(found)
        asked = owner["spec"].get("volumeClaimTemplates", ())
        claims[group] = [one["spec"] for one in asked if one["metadata"]["name"] == "kv"]
        volumes[group] = [one["emptyDir"] for one in spec["volumes"] if one["name"] == "kv"]
    assert options["h200"] == ["--disk-tier=/kv:400"] and options["cpu"] == ["--disk-tier=/kv:10"]
    assert not options["mig"] and not claims["mig"] and not volumes["mig"]
    (claim,) = claims["h200"]
    assert claim["storageClassName"] == "fast" and not volumes["h200"]
    assert amount(claim["resources"]["requests"]["storage"]) > 400 << 30
    assert amount(volumes["cpu"][0]["sizeLimit"]) > 10 << 30 and not claims["cpu"]
