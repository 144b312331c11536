"""Fixtures of the deployment's tests: tools, an environment with the wheel, a stand-in cluster."""

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from default_model.folder import ensure
from tests.deploy.cluster.network import why_not
from tests.deploy.cluster.node.images import LIBRARIES, Images
from tests.deploy.cluster.standin import Client, StandIn, Tools
from tests.packaging.wheels import build_wheel, install
from tests.tiny_model import FEW_WORDS, save_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tools() -> Tools:
    """helm and kubectl, of `make test-deploy` or on the path."""
    found = []
    for name in ("helm", "kubectl"):
        own = ROOT / ".venv-deploy" / "bin" / name
        path = str(own) if own.exists() else shutil.which(name)
        if path is None:
            pytest.skip(f"no {name}: `make test-deploy` brings it")
        found.append(Path(path))
    return Tools(*found)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """All images, over one environment with this tree's wheel."""
    folder = tmp_path_factory.mktemp("image")
    environment = install(build_wheel(folder / "wheel"), folder / "environment")
    script = environment.folder / "bin" / "pagewire"
    _, _, code = script.read_text().partition("\n")
    script.write_text(f"#!/opt/pagewire/bin/python\n{code}")  # where images have it
    (environment.site_packages / "libraries.pth").write_text(f"{LIBRARIES}\n")
    kernels = folder / "kernels"
    kernels.mkdir()
    kernels.chmod(0o1777)
    return Images(environment, Path(sysconfig.get_path("purelib")), kernels)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model in `tiny/`, readable by all users."""
    folder = tmp_path_factory.mktemp("models")
    model = save_tiny_model(folder / "tiny", ensure(), FEW_WORDS)
    for path in (folder, model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def cluster(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """A stand-in cluster; no process of it is left after the tests."""
    if lack := why_not():
        pytest.skip(f"no stand-in cluster: {lack}")
    with StandIn(images, tmp_path_factory.mktemp("cluster")) as running:
        yield running
    assert running.processes() == []
    assert running.failures() == []


@pytest.fixture(scope="module")
def client(cluster: StandIn, tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """helm and kubectl, talking to the stand-in."""
    return Client(tools, cluster.kubeconfig, tmp_path_factory.mktemp("home"))
