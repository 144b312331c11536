"""The rendered objects are what Kubernetes and the custom resources' own types and rules accept."""

import hashlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import pytest

from tests.deploy.chart.rendering import (
    ROOT,
    SETS,
    TOOLS,
    VALUES,
    Object,
    helm_template,
    rendered,
    rendered_text,
    run,
    tool,
)

OLDEST, NEWEST = "1.30", "1.37"  # Chart.yaml has the oldest, too
# Group and version to the package with the types of its custom resources.
PACKAGES = {
    "cert-manager.io/v1": "cert-manager",
    "gateway.networking.k8s.io/v1": "gateway-api",
    "keda.sh/v1alpha1": "keda",
    "monitoring.coreos.com/v1": "prometheus-operator",
}
VALIDATE = (sys.executable, "-m", "kubernetes_validate")
PASSED, UNKNOWN = "INFO {} passed for resource", "WARN {} Couldn't find schema for kind"


def file_of(found: Object) -> str:
    """The name of the file with this object; equal objects of several sets have one."""
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


@cache
def validated(version: str) -> subprocess.CompletedProcess[str]:
    """The verdict of a version of Kubernetes on all sets, each object once."""
    with TemporaryDirectory() as folder:
        for found in (found for name in SETS for found in rendered(name)):
            (Path(folder) / file_of(found)).write_text(json.dumps(found))
        paths = sorted(map(str, Path(folder).iterdir()))
        done = run(*VALIDATE, "--strict", "-k", version, *paths)
    done.stdout = (done.stdout + done.stderr).replace(f"{folder}/", "")
    return done


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    done = validated(version)
    for found in rendered(name):
        expected = UNKNOWN if found["apiVersion"] in PACKAGES else PASSED
        file = file_of(found)
        lines = [line for line in done.stdout.splitlines() if file in line]
        assert len(lines) == 1 and lines[0].startswith(expected.format(file)), lines
    assert done.returncode == 0, done.stdout


def test_a_planted_mistake_in_an_object_of_kubernetes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "objects.yaml"
    path.write_text(rendered_text("defaults").replace("replicas: ", "replica: ", 1))
    done = run(*VALIDATE, "--strict", "-k", NEWEST, str(path))
    assert done.returncode != 0
    assert "'replica' was unexpected" in done.stdout + done.stderr


def custom_resources() -> list[tuple[str, Object]]:
    """The custom resources of all sets, with the name of the set."""
    return [
        (name, found)
        for name in SETS
        for found in rendered(name)
        if found["apiVersion"] in PACKAGES
    ]


def complaints(objects: list[Object]) -> str:
    """Complaints of the types (fields) and the validators (values) of custom resources."""
    typed = "\n".join(
        f'import type {{ I{found["kind"]} as T{n} }} from "{module(found)}/{found["kind"]}";\n'
        f"export const o{n}: T{n} = {json.dumps(found)};"
        for n, found in enumerate(objects)
    )
    checks = "\n".join(
        f'import {{ {found["kind"]} as C{n} }} from "{module(found)}/{found["kind"]}";\n'
        f"try {{ new C{n}({json.dumps(found)}).validate(); }}"
        f" catch (error) {{ console.log({n}, error.message); }}"
        for n, found in enumerate(objects)
    )
    sources = TOOLS / "objects"
    sources.mkdir(exist_ok=True)
    (sources / "typed.ts").write_text(typed)
    (sources / "checks.mjs").write_text(checks)
    options = (
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--module",
        "nodenext",
        "--target",
        "es2022",
    )
    compiled = run(
        tool("node"), f"{TOOLS}/node_modules/typescript/bin/tsc", *options, f"{sources}/typed.ts"
    )
    ran = run(tool("node"), f"{sources}/checks.mjs")
    return compiled.stdout + compiled.stderr + ran.stdout + ran.stderr


def module(found: Object) -> str:
    return f"@kubernetes-models/{PACKAGES[found['apiVersion']]}/{found['apiVersion']}"


def test_custom_resources_are_of_their_types() -> None:
    objects = custom_resources()
    kinds = {found["kind"] for _, found in objects}
    assert {"Certificate", "GRPCRoute", "HTTPRoute", "Issuer", "PodMonitor"} <= kinds
    assert {"PrometheusRule", "ScaledObject", "ServiceMonitor"} <= kinds
    assert complaints([found for _, found in objects]) == ""


def test_a_planted_mistake_in_a_custom_resource_is_named() -> None:
    route, scaled = (
        next(found for _, found in custom_resources() if found["kind"] == kind)
        for kind in ("HTTPRoute", "ScaledObject")
    )
    route["spec"]["rules"][0]["timeouts"]["idle"] = "0s"
    scaled["spec"]["minReplicaCount"] = "two"
    said = complaints([route, scaled])
    assert """'"idle"' does not exist""" in said
    assert "minReplicaCount must be integer" in said


def test_the_schema_of_the_values_is_a_schema() -> None:
    schema = json.loads((ROOT / "deploy/k8s/chart/values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)


def test_an_older_cluster_is_refused() -> None:
    done = helm_template(f"--values={VALUES}/defaults.yaml", "--kube-version=1.29.0")
    assert done.returncode != 0
    assert re.search(r"requires kubeVersion: >=1\.30", done.stderr)
