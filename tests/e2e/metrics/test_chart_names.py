"""What alerts, dashboard and autoscalers of the chart ask for, a running stack exports."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.chart.rendering import SETS, of_kind, rendered
from tests.e2e.conftest import Product
from tests.e2e.metrics.metrics_load import LoadClient, Scrapes

NAME = re.compile(r"\b(?:pagewire|process|vllm)[_:][a-z0-9_]+(?=[{)\s]|$)")
LABEL = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")
BY = re.compile(r"\bby \(([^)]*)\)")
# Prometheus' own, the Kubernetes discovery's, and the monitors'.
OF_OTHERS = {"up"}
LABELS_OF_OTHERS = {"namespace", "pod", "pagewire_release", "pagewire_tier"}


def queries() -> list[str]:
    """All of them: expressions, and metrics that autoscalers name."""
    alerts = of_kind(rendered("monitoring"), "PrometheusRule")[0]["spec"]["groups"][0]["rules"]
    dashboard = of_kind(rendered("monitoring"), "ConfigMap")[0]["data"]["pagewire.json"]
    found = [alert["expr"] for alert in alerts]
    found += [t["expr"] for p in json.loads(dashboard)["panels"] for t in p.get("targets", ())]
    found += [
        trigger["metadata"]["query"]
        for scaled in of_kind(rendered("keda"), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    found += [
        metric["external"]["metric"]["name"]
        for name in SETS
        for scaler in of_kind(rendered(name), "HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "External"
    ]
    return found


@pytest.fixture(scope="module")
def exported(tiny_product: Product) -> dict[str, set[str]]:
    """The names of samples after a request, with the labels that they have."""
    LoadClient(tiny_product).send(prompt="one", max_tokens=3, ignore_eos=True, stream=True)
    names: dict[str, set[str]] = {}
    for text in Scrapes(tiny_product).texts.values():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                names.setdefault(sample.name, set()).update(sample.labels)
            names.setdefault(family.name, set())
            if family.type == "counter":  # one that has not counted yet
                names.setdefault(f"{family.name}_total", set())
    return names


def test_every_name_is_exported(exported: dict[str, set[str]]) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)} - LABELS_OF_OTHERS
    assert len(asked) > 30
    assert asked - exported.keys() == set()


def test_every_label_is_one_of_its_metric(exported: dict[str, set[str]]) -> None:
    for query in queries():
        for name, matchers in LABEL.findall(query):
            if name in OF_OTHERS or not exported[name]:
                continue
            labels = set(re.findall(r'([a-z_]+)[!=~]+"', matchers))
            assert labels - LABELS_OF_OTHERS <= exported[name], query


def test_sums_are_by_labels_that_there_are(exported: dict[str, set[str]]) -> None:
    for query in queries():
        had = set().union(*(exported[name] for name in NAME.findall(query) if name in exported))
        by = {label.strip() for labels in BY.findall(query) for label in labels.split(",")}
        if had:
            assert by - LABELS_OF_OTHERS <= had, query
