"""Claims about the images that their Dockerfiles alone can show."""

import difflib
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.images.dockerfile import IMAGES, NAMES, ROOT, Stage, parse, read
from tests.deploy.images.replay import context

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The extras that the images are made of.
EXTRAS = ("gateway", "scheduler", "worker", "transformers", "default-model")


def pins(path: Path) -> dict[str, str]:
    """Versions by package."""
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] != "#")


PINS = pins(ROOT / "constraints.txt")
TRANSITIVE = pins(IMAGES / "transitive.txt")


def needed(package: str, extras: Iterable[str]) -> set[str]:
    """The needs of a package and of these, by what is installed, as canonical names."""
    found: set[str] = set()
    left = [(package, frozenset(extras))]
    seen = set()
    while left:
        if (wanted := left.pop()) in seen:
            continue
        seen.add(wanted)
        for text in metadata.requires(wanted[0]) or ():
            one = Requirement(text)
            marks = [{"extra": extra} for extra in (wanted[1] or {""})]
            if one.marker is None or any(map(one.marker.evaluate, marks)):
                found.add(canonicalize_name(one.name))
                left.append((one.name, frozenset(one.extras)))
    return found


def final(name: str) -> Stage:
    """The stage that a build without --target gives."""
    return list(read(name).values())[-1]


def test_each_image_has_a_folder_and_each_folder_an_image() -> None:
    assert sorted(path.name for path in IMAGES.iterdir() if path.is_dir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_one_service_as_a_user_without_rights_and_without_a_shell(name: str) -> None:
    stage = final(name)
    assert stage.last("USER").text == "10001:10001"
    service = name.partition("-")[0]
    assert stage.last("ENTRYPOINT").words == ["/opt/pagewire/bin/pagewire", "serve", service]
    assert stage.last("ENTRYPOINT").text.startswith("[")
    assert stage.all_of("CMD") == []
    # What asks for health is no shell's line, and asks where the image's variables say.
    _, _, command = stage.last("HEALTHCHECK").text.partition(" CMD ")
    port = stage.variables["PAGEWIRE_HEALTH_PORT"]
    assert command.strip().startswith("[") and f'"127.0.0.1:{port}"]' in command
    assert {port, stage.variables["PAGEWIRE_METRICS_PORT"]} <= set(stage.last("EXPOSE").words)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_says_what_it_is(name: str) -> None:
    prefix = "org.opencontainers.image."
    labels = dict(word.split("=", 1) for word in final(name).last("LABEL").words)
    assert labels[f"{prefix}title"] == f"pagewire-{name}"
    assert labels[f"{prefix}version"] == PROJECT["version"]
    assert labels[f"{prefix}licenses"] == PROJECT["license"]
    assert labels[f"{prefix}description"]
    assert any("/licenses/" in copy.words for copy in final(name).all_of("COPY"))


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_installed_is_pinned(name: str) -> None:
    stages = read(name)
    bases = {stage.base for stage in stages.values()} - set(stages) - {"scratch"}
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    steps = [step.text for stage in stages.values() for step in stage.all_of("RUN")]
    installs = [part for step in steps for part in step.split(";") if " install " in part]
    for install in installs:
        pinned = "--constraint constraints.txt --constraint transitive.txt" in install
        assert pinned or "apt-get" in install, install
    torch = stages["build"].variables.get("TORCH", f"torch=={PINS['torch']}")
    assert torch == f"torch=={PINS['torch']}"


def test_what_is_installed_pulls_in_nothing_that_is_not_pinned() -> None:
    direct = {canonicalize_name(name) for name in PINS}
    assert needed("pagewire", EXTRAS) - direct == TRANSITIVE.keys()


def test_the_images_get_the_versions_that_the_tests_ran_with() -> None:
    assert {name: metadata.version(name) for name in TRANSITIVE} == TRANSITIVE


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_contents_is_a_build_target_of_its_own(name: str) -> None:
    stages = read(name)
    assert stages["sbom"].base == "scratch"
    (copied,) = stages["sbom"].instructions
    assert copied.flags == {"from": "inventory"}
    assert "cyclonedx-py environment" in stages["inventory"].last("RUN").text
    assert list(stages)[-1] == name  # what a build without --target gives


def test_a_builder_makes_one_wheel_for_all_images() -> None:
    first, *others = (read(name)["wheel"] for name in NAMES)
    assert all(other == first for other in others)
    assert not any("from" in step.flags for step in first.instructions)


@pytest.mark.parametrize("name", ["gateway", "scheduler"])
def test_images_without_torch_begin_from_nothing(name: str) -> None:
    stage = final(name)
    assert stage.base == "scratch" and stage.all_of("RUN") == []
    assert "torch" not in "".join(step.text for step in read(name)["build"].instructions)


def test_the_two_workers_differ_in_what_their_device_asks_for_alone() -> None:
    texts = [(IMAGES / name / "Dockerfile").read_text() for name in ("worker-cpu", "worker-cuda")]
    lines = [text.replace("worker-cuda", "worker-cpu").splitlines() for text in texts]
    differing = [line for line in difflib.ndiff(*lines) if line[0] in "+-" and line[2:3] != "#"]
    assert all(
        any(word in line for word in ("description", "NVIDIA_", "start-period"))
        for line in differing
    ), differing


def test_a_build_sees_the_wheels_sources_and_nothing_else() -> None:
    names = context()
    assert {name.split("/")[0] for name in names} == {
        *("LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py"),
        *("default_model", "gateway", "kernels", "pagewire", "scheduler_svc", "simulator"),
        *("deploy", "wire", "worker_svc"),
    }
    assert [name for name in names if name.startswith("deploy/")] == [
        "deploy/images/runtime.py",
        "deploy/images/transitive.txt",
    ]
    assert "kernels/cpu/layer.c" in names


def test_a_dockerfile_is_read_as_a_builder_reads_it() -> None:
    stages = parse(
        "ARG A=b:1\nFROM ${A} AS one\nENV X=1 \\\n    Y='2 3'\n# no\nRUN --mount=type=a,id=b \\\n"
        '    c && d\nFROM one AS two\nCOPY --from=one --chown=1:2 /a /b\nENTRYPOINT ["e", "f g"]\n'
    )
    assert stages["one"].base == "b:1" and stages["two"].base == "one"
    assert stages["one"].variables == {"X": "1", "Y": "2 3"}
    assert stages["one"].last("RUN").flags == {"mount": "type=a,id=b"}
    assert stages["two"].last("COPY").flags == {"from": "one", "chown": "1:2"}
    assert stages["two"].last("ENTRYPOINT").words == ["e", "f g"]
