"""`deploy/compose.yaml`: the three services on one host, as the Compose specification has it."""

from typing import Any

import compose_spec
import pytest
import yaml

from tests.deploy.images.dockerfile import IMAGES, ROOT, read

COMPOSE = ROOT / "deploy" / "compose.yaml"
SERVICES = {"gateway": "gateway", "scheduler": "scheduler", "worker": "worker-cpu"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read_file: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return dict(read_file["services"])


def plain(text: str) -> str:
    """With anchors and variables resolved, as an engine does before it validates."""
    text = text.replace("${PAGEWIRE_MODEL:?the folder of a model}", "/models/some")
    return yaml.safe_dump(yaml.safe_load(text.replace("${PAGEWIRE_WORKER:-worker-cpu}", "worker")))


def test_it_follows_the_specification() -> None:
    compose_spec.PyCompose.from_yaml(plain(COMPOSE.read_text())).validate()


@pytest.mark.parametrize(
    ("old", "new"),
    [("read_only: true", "readonly: true"), ("restart: unless", "restart: perhaps")],
)
def test_a_slip_is_refused(old: str, new: str) -> None:
    text = COMPOSE.read_text()
    assert old in text
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml(plain(text.replace(old, new, 1))).validate()


@pytest.mark.parametrize(("service", "image"), SERVICES.items())
def test_each_service_runs_its_image_with_as_few_rights(
    services: dict[str, Any], service: str, image: str
) -> None:
    given = services[service]
    assert given["build"]["dockerfile"].replace("${PAGEWIRE_WORKER:-worker-cpu}", image) == (
        f"{IMAGES.relative_to(ROOT)}/{image}/Dockerfile"
    )
    assert (COMPOSE.parent / given["build"]["context"]).resolve() == ROOT
    assert given["read_only"] is True and given["cap_drop"] == ["ALL"]
    assert given["user"] == list(read(image).values())[-1].last("USER").text
    assert "privileged" not in given and "entrypoint" not in given
    mounted = {volume["target"]: volume for volume in given["volumes"]}
    assert mounted["/cache"]["type"] == "volume"
    assert all(volume.get("read_only") for path, volume in mounted.items() if path == "/model")


def test_only_the_gateway_is_reached_from_outside(services: dict[str, Any]) -> None:
    assert [name for name, given in services.items() if "ports" in given] == ["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])
    assert {name: given["networks"] for name, given in services.items()} == {
        "gateway": ["inner", "outer"],
        "scheduler": ["inner"],
        "worker": ["inner"],
    }


def test_each_service_has_longer_to_stop_than_to_drain(services: dict[str, Any]) -> None:
    for given in services.values():
        assert int(given["stop_grace_period"].removesuffix("s")) > 60  # --drain-timeout-s
        assert not any("drain-timeout" in word for word in given["command"])


def test_the_commands_of_its_head_name_files_that_it_reads() -> None:
    assert "run/peer.token" in COMPOSE.read_text()
    secret = yaml.safe_load(COMPOSE.read_text())["secrets"]["peer-token"]["file"]
    assert (COMPOSE.parent / secret).resolve() == ROOT / "run" / "peer.token"
    assert "run/" in (ROOT / ".gitignore").read_text().splitlines()
