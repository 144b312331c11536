"""The README's tables come from the comments, and docs/deploy.md names what there is."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart.rendering import CHART, ROOT, helm_template, of_kind, rendered, run, tool
from tests.deploy.chart.service_options import PARSERS, long_options

DOCUMENT = (ROOT / "docs" / "deploy.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VALUE = re.compile(
    r"`((?:model|gateway|scheduler|worker|tls|apiKeys|peerToken|networkPolicy|monitoring|ingress)"
    r"\.[A-Za-z.]+)(?:: [a-z]+)?`"
)
OPTION = re.compile(r"`([a-z]+(?:-[a-z]+)+)(?:: [a-z0-9]+)?`")
NOT_OPTIONS = {"ingress-nginx", "cert-manager", "worker-cpu"}


def test_the_readme_has_the_tables_of_the_comments() -> None:
    done = run(sys.executable, str(ROOT / "deploy/k8s/readme.py"), "--check")
    assert done.returncode == 0, done.stderr or "run `python deploy/k8s/readme.py`"


def value_at(values: Any, path: str) -> bool:
    """True if the chart has a value of this name; options of services are in its schema."""
    names = path.split(".")
    if len(names) == 3 and names[1] == "options":
        return names[2] in long_options(names[0])
    for name in names:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_every_value_in_the_document_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(VALUE.findall(DOCUMENT)) - {"tls.crt", "tls.key"}  # keys of secrets
    assert len(named) > 10
    assert [name for name in sorted(named) if not value_at(values, name)] == []


def test_every_option_in_the_document_exists() -> None:
    known = {name for tier in PARSERS for name in long_options(tier)}
    named = set(OPTION.findall(DOCUMENT)) - NOT_OPTIONS
    assert len(named) > 5
    assert named - known == set()


def test_the_values_in_the_document_render(tmp_path: Path) -> None:
    (source,) = (text for language, text in FENCE.findall(DOCUMENT) if language == "yaml")
    path = tmp_path / "my-values.yaml"
    path.write_text(source)
    done = helm_template("--values", str(path))
    assert done.returncode == 0, done.stderr
    names = {o["metadata"]["name"] for o in yaml.safe_load_all(done.stdout) if o}
    assert {"demo-pagewire-worker-large", "demo-pagewire-worker-small"} <= names


def commands(program: str) -> list[str]:
    """The lines of the document's shell blocks that run a program."""
    blocks = "".join(text for language, text in FENCE.findall(DOCUMENT) if language == "sh")
    return [line.strip() for line in blocks.splitlines() if line.strip().startswith(program)]


@pytest.mark.parametrize("line", commands("helm "))
def test_helm_knows_the_documents_commands(line: str) -> None:
    words = line.split()
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    helped = run(tool("helm"), words[1], "--help")
    assert helped.returncode == 0
    assert [flag for flag in flags if f"{flag} " not in helped.stdout] == []


@pytest.mark.parametrize("line", commands("kubectl "))
def test_kubectl_and_the_chart_know_the_documents_commands(line: str) -> None:
    objects = {f"{o['kind'].lower()}/{o['metadata']['name']}" for o in rendered("defaults")}
    for word in line.split():
        if "/demo-" in word:
            assert word in objects
    verb = line.replace("--namespace llm ", "").split()[1]
    assert run(tool("kubectl"), verb, "--help").returncode == 0


def test_the_notes_print_the_next_commands() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    assert re.findall(r"^(\d)\. ", notes, re.MULTILINE) == ["1", "2", "3"]
    done = run(
        tool("helm"), "install", "demo", str(CHART), "--namespace=llm", "--dry-run=client",
        "--set=apiKeys.secret=k,test.apiKeySecret=t,tls.enabled=true,tls.public.enabled=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition("NOTES:")[2]
    assert "rollout status deployment/demo-pagewire-gateway" in said
    assert "port-forward service/demo-pagewire-gateway 8000:8000 50051:50051" in said
    assert "--cacert ca.crt https://localhost:8000" in said
    assert "authorization: Bearer $PAGEWIRE_API_KEY" in said


def test_the_dashboard_is_json_with_every_panel() -> None:
    (found,) = (o for o in of_kind(rendered("monitoring"), "ConfigMap"))
    dashboard = json.loads(found["data"]["pagewire.json"])
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) == 20
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"]), "two panels lie on each other"
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert 'namespace="$ns",pagewire_release="$release"' in target["expr"]
