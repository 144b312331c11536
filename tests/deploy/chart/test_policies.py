"""Who may talk to which port: every edge that the product needs, and no other."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.chart.rendering import SETS, Object, of_kind, pods, rendered
from tests.deploy.chart.semantics import label, labels_of_pods, ports_of

TIER = "app.kubernetes.io/component"
NEEDED = {
    ("gateway", "scheduler", 50052),
    ("scheduler", "worker", 50053),
    ("test", "gateway", 50051),
    ("test", "gateway", 8000),
    *((tier, "dns", 53) for tier in ("gateway", "scheduler", "worker", "test")),
}
TO_TEST = {edge for edge in NEEDED if edge[0] == "test"}
EVERYWHERE: Object = {}


def selects(peer: Object, labels: dict[str, str]) -> bool:
    """True if a peer without a namespace is a pod with these labels."""
    wanted = peer.get("podSelector", {}).get("matchLabels", {})
    return "namespaceSelector" not in peer and wanted.items() <= labels.items()


def allows(policies: list[Object], way: str, other: dict[str, str], port: int) -> bool:
    """True if policies that hold for a pod let it talk so (`from` or `to`) to another pod."""
    side = "ingress" if way == "from" else "egress"
    for policy in policies:
        for rule in policy["spec"].get(side, ()):
            peers = rule.get(way)
            meets = peers is None or any(selects(peer, other) for peer in peers)
            if meets and port in [p["port"] for p in rule.get("ports", ())]:
                return True
    return not policies


def policies_of(objects: list[Object], labels: dict[str, str]) -> list[Object]:
    found = of_kind(objects, "NetworkPolicy")
    return [
        p for p in found if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]  # fmt: skip


def edges(objects: list[Object]) -> Iterator[tuple[str, str, int]]:
    """Pairs of tiers with each port at which one reaches the other, and DNS elsewhere."""
    for caller in pods(objects):
        labels = labels_of_pods(caller)
        mine = policies_of(objects, labels)
        assert mine, f"no policy holds for {label(caller)}"
        if allows(mine, "to", EVERYWHERE, 53):
            yield labels[TIER], "dns", 53
        for called in pods(objects):
            other = labels_of_pods(called)
            for port in ports_of(called).values():
                out = allows(mine, "to", other, port)
                if out and allows(policies_of(objects, other), "from", labels, port):
                    yield labels[TIER], other[TIER], port


@pytest.mark.parametrize("name", [name for name in SETS if name != "names"])
def test_each_needed_edge_is_open_and_no_other(name: str) -> None:
    # The test pod may call gRPC alone: its own policy is narrower than the gateway's.
    assert set(edges(rendered(name))) == NEEDED - {("test", "gateway", 8000)}


def rules(name: str, tier: str, side: str) -> Any:
    (found,) = (
        p
        for p in of_kind(rendered(name), "NetworkPolicy")
        if p["spec"]["podSelector"]["matchLabels"][TIER] == tier
    )
    assert found["spec"]["policyTypes"] == ["Ingress", "Egress"]
    return found["spec"].get(side, [])


@pytest.mark.parametrize("tier", ["gateway", "scheduler", "worker"])
def test_only_scrapers_read_metrics(tier: str) -> None:
    for name, said in (("defaults", "monitoring"), ("service-monitor", "prometheus")):
        with_metrics = [
            rule for rule in rules(name, tier, "ingress") if {"port": 9464} in rule["ports"]
        ]
        assert len(with_metrics) == 1
        assert said in str(with_metrics[0]["from"])


def test_clients_are_all_or_those_that_the_values_name() -> None:
    assert "from" not in rules("defaults", "gateway", "ingress")[0]
    named = rules("ingress", "gateway", "ingress")[0]["from"]
    assert "ingress-nginx" in str(named[0])
    assert named[1]["podSelector"]["matchLabels"][TIER] == "test"


@pytest.mark.parametrize(
    ("name", "tier", "ports"),
    [
        ("defaults", "worker", set()),
        ("tensor-parallel", "worker", set()),
        ("hub-token", "scheduler", set()),
        ("hub-token", "gateway", {443}),
        ("s3", "worker", {443, 9000}),
        ("volume", "worker", set()),
        ("volume", "gateway", {443}),
    ],
)
def test_only_pods_that_fetch_a_model_reach_outside(name: str, tier: str, ports: set[int]) -> None:
    outside = {
        port["port"]
        for rule in rules(name, tier, "egress")
        if "to" not in rule
        for port in rule["ports"]
    }
    assert outside - {53} == ports


def test_the_health_port_is_for_the_node_alone() -> None:
    for policy in of_kind(rendered("defaults"), "NetworkPolicy"):
        assert "9463" not in str(policy)
