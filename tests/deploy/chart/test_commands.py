"""Every command line of every set of values is understood by the program that it starts."""

import argparse
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from default_model.fetch import RELEASE
from default_model.folder import REVISION
from pagewire.cli import complete
from pagewire.hub import names
from pagewire.hub.download import SMALL_FILES
from tests.deploy.chart.rendering import SETS, Object, of_kind, pod_spec, pods, rendered
from tests.deploy.chart.service_options import OWNED, PARSERS
from wire.identity.options import take_identity

WORKLOADS = ("Deployment", "StatefulSet")


def services(name: str) -> Iterator[tuple[str, Object, Object]]:
    """The tier, the container and the pod of each service of a set."""
    for owner in of_kind(rendered(name), *WORKLOADS):
        spec = pod_spec(owner)
        (container,) = spec["containers"]
        yield container["command"][2], container, spec


def initial(name: str) -> Iterator[tuple[str, Object]]:
    """The tier and the container that fetches the model, where there is one."""
    for tier, _, spec in services(name):
        for container in spec.get("initContainers", ()):
            yield tier, container


@pytest.mark.parametrize("name", SETS)
def test_services_understand_their_options(name: str) -> None:
    tiers = set()
    for tier, container, _ in services(name):
        tiers.add(tier)
        assert container["command"] == ["pagewire", "serve", tier]
        options = vars(PARSERS[tier]().parse_args(container["args"]))
        identity = take_identity(options)
        if tier != "gateway":
            identity.check_host("0.0.0.0")
        given = [word.partition("=")[0] for word in container["args"]]
        repeatable = {"--worker-dns", "--tenant-weight"}
        assert len(set(given)) == len([g for g in given if g not in repeatable]) + len(
            repeatable & set(given)
        ), "an option is given twice"
    assert tiers == set(PARSERS)


@pytest.mark.parametrize("name", SETS)
def test_files_of_options_are_mounted(name: str) -> None:
    """And what is mounted is asked for: no secret lies in a pod that does not use it."""
    for _, container, _ in services(name):
        mounts = [PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]]
        values = [PurePosixPath(word.partition("=")[2]) for word in container["args"]]
        used = {mount for mount in mounts for value in values if value.is_relative_to(mount)}
        files = [value for value in values if str(value).startswith(("/etc", "/models"))]
        assert all(any(file.is_relative_to(mount) for mount in mounts) for file in files)
        unused = {str(mount) for mount in mounts if str(mount).startswith("/etc")} - set(
            map(str, used)
        )
        assert unused == set()


def test_the_chart_owns_only_options_that_there_are() -> None:
    known = {
        option.removeprefix("--")
        for parser in PARSERS.values()
        for action in parser()._actions
        for option in action.option_strings
    }
    assert known >= OWNED


def test_the_embedded_model_is_where_its_command_puts_it() -> None:
    for tier, container, _ in services("defaults"):
        if tier != "scheduler":
            (model,) = (w for w in container["args"] if w.startswith("--model="))
            folder = PurePosixPath(model.partition("=")[2])
            assert folder.parent == PurePosixPath("/models") / f"{RELEASE}-r{REVISION}"
    for _, container in initial("defaults"):
        assert container["command"] == ["python", "-m", "default_model"]
        assert container["args"] == ["--cache", "/models"]


@pytest.mark.parametrize("name", ["hub-token", "groups", "volume"])
def test_a_hubs_model_is_fetched_before_and_found_offline(name: str) -> None:
    tiers = set()
    for tier, container in initial(name):
        tiers.add(tier)
        assert container["command"] == ["python", "-m", "pagewire.hub"]
        assert ("--without-weights" in container["args"]) == (tier == "gateway")
        assert names.parse(container["args"][-1]) is not None
        home = {v["name"]: v.get("value") for v in container["env"]}["HF_HOME"]
        assert home.startswith("/models/")
    assert "gateway" in tiers
    for tier, container, _ in services(name):
        variables = {v["name"]: v.get("value") for v in container["env"]}
        assert "HF_TOKEN" not in variables, "only what fetches sees the token"
        if tier in tiers:
            assert variables["HF_HOME"] == "/models/hub"
            assert variables["HF_HUB_OFFLINE"] == "1"


def test_a_gateway_fetches_from_s3_what_it_would_from_a_hub() -> None:
    for tier, container in initial("s3"):
        included = {w.partition("=/")[2] for w in container["args"] if w.startswith("--include=")}
        assert included == (set(SMALL_FILES) if tier == "gateway" else set())


@pytest.mark.parametrize("name", [name for name in SETS if name != "names"])
def test_helm_test_is_a_command_of_ours(name: str) -> None:
    (pod,) = of_kind(rendered(name), "Pod")
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["pagewire", "complete"]
    parser = argparse.ArgumentParser()
    complete.add_parser(parser.add_subparsers())
    options = parser.parse_args([*container["command"][1:], *container["args"]])
    (service,) = (
        s for s in of_kind(rendered(name), "Service") if s["metadata"]["name"].endswith("-gateway")
    )
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert options.target == f"demo-pagewire-gateway.llm.svc.{domain(name)}:{ports['grpc']}"
    assert options.min_tokens == 1


def domain(name: str) -> str:
    return "cluster.example" if name == "tls-issuer" else "cluster.local"


@pytest.mark.parametrize("name", SETS)
def test_no_command_needs_a_shell(name: str) -> None:
    for owner in pods(rendered(name)):
        spec = pod_spec(owner)
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            assert container["command"][0] in {"pagewire", "python", "rclone"}
            assert all(isinstance(word, str) for word in container["command"] + container["args"])
