"""Each Dockerfile's own steps, followed into an empty root, give a service that serves a token."""

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import httpx
import pytest
import yaml

from default_model.folder import ensure
from pagewire._channel import Connection
from pagewire.cli import health
from tests.deploy.images.dockerfile import ROOT, read
from tests.deploy.images.replay import Container, Replay, container, why_not
from tests.pace import patience
from tests.ports import free_port
from tests.tiny_model import FEW_WORDS, save_tiny_model

IMAGES = ("gateway", "scheduler", "worker-cpu")
WITHOUT_TORCH = ("gateway", "scheduler")
MAX_MB = 250
PACKAGES = "opt/pagewire/lib/python*/site-packages"
UID = 10001

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no replay of images: {why_not()}"),
]


@dataclass(slots=True)
class Running:
    """A started image."""

    image: Container
    process: "subprocess.Popen[bytes]"
    health_port: int
    log: Path

    def is_healthy(self) -> bool:
        """The answer of the image's own HEALTHCHECK, asked in the container."""
        _, _, text = self.image.stage.last("HEALTHCHECK").text.partition(" CMD ")
        default = self.image.variables["PAGEWIRE_HEALTH_PORT"]
        words = [word.replace(default, str(self.health_port)) for word in json.loads(text)]
        command = self.image.command(volumes={}, entrypoint=words)
        return not subprocess.run(
            command, env=self.image.variables, capture_output=True, timeout=patience(60)
        ).returncode

    def wait_until_healthy(self) -> None:
        """Asks from here, without a process that imports gRPC each time, and then as above."""
        deadline_s = time.monotonic() + patience(120)
        address = Connection(f"127.0.0.1:{self.health_port}")
        while not health.check(address).is_serving:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)
        assert self.is_healthy(), self.log.read_text()


@dataclass(slots=True)
class Host:
    """Containers of the images, with the commands of compose.yaml, on ports that are free."""

    images: dict[str, Container]
    model: Path
    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)

    def port(self, name: str) -> str:
        return str(self.ports.setdefault(name, free_port()))

    def start(self, service: str, *options: str) -> Running:
        given = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"][service]
        image = self.images[f"{service}-cpu" if service == "worker" else service]
        secrets = self.folder / "secrets"
        secrets.mkdir(exist_ok=True)
        (secrets / "peer-token").write_text("a-secret-of-all-services\n")
        words = [
            word.replace("worker:50053", f"127.0.0.1:{self.port('worker')}").replace(
                "scheduler:50052", f"127.0.0.1:{self.port('scheduler')}"
            )
            for word in given["command"]
        ]
        health_port = free_port()
        ports = ("--health-port", str(health_port), "--metrics-port", str(free_port()))
        command = image.command(
            *(*words, *ports, *options), volumes={self.model: "/model", secrets: "/run/secrets"}
        )
        log = self.folder / f"{service}.log"
        with log.open("wb") as said:
            process = subprocess.Popen(command, env=image.variables, stdout=said, stderr=said)
        self.running[service] = Running(image, process, health_port, log)
        return self.running[service]

    def stop(self) -> dict[str, int]:
        """Ends all by SIGTERM; returns their exit codes."""
        for each in self.running.values():
            each.process.terminate()
        return {
            name: each.process.wait(patience(60)) for name, each in reversed(self.running.items())
        }


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replay]:
    folder = tmp_path_factory.mktemp("images")
    cache: dict[str, Path] = {}
    return {name: Replay(read(name), folder / name, cache) for name in IMAGES}


@pytest.fixture(scope="module")
def images(replays: dict[str, Replay]) -> dict[str, Container]:
    return {name: container(replay) for name, replay in replays.items()}


@pytest.fixture(scope="module")
def host(images: dict[str, Container], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    model = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", ensure(), FEW_WORDS)
    for path in (model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    host = Host(images, model, tmp_path_factory.mktemp("host"))
    try:
        yield host
    finally:
        for each in host.running.values():
            each.process.kill()
            each.process.wait()


def distributions(image: Container) -> set[str]:
    """The packages in an image, by pip's names."""
    (folder,) = image.root.glob(PACKAGES)
    return {each.name.lower() for each in metadata.distributions(path=[str(folder)])}


def test_the_services_of_the_images_serve_a_token_and_end_by_sigterm(host: Host) -> None:
    """All three run as a user without rights, in a root that cannot be written to."""
    gateway = host.start(
        "gateway", "--http-port", host.port("http"), "--grpc-port", host.port("grpc")
    )
    small = ("--threads", "1", "--kv-cache-gib", "0.2", "--dtype", "float32")
    worker = host.start("worker", "--port", host.port("worker"), *small)
    worker.wait_until_healthy()
    assert not gateway.is_healthy()  # the process answers, and has no scheduler
    host.start("scheduler", "--port", host.port("scheduler")).wait_until_healthy()
    gateway.wait_until_healthy()

    body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    url = f"http://127.0.0.1:{host.port('http')}/v1/completions"
    answer = httpx.post(url, json=body, timeout=patience(60)).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["text"]
    # A compiler is in the image: the kernels are compiled into the cache.
    assert "no CPU kernels" not in worker.log.read_text()
    for each in host.running.values():
        status = Path(f"/proc/{each.process.pid}/status").read_text()
        assert f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}" in status
    assert host.stop() == {"gateway": 0, "worker": 0, "scheduler": 0}
    for each in host.running.values():
        assert "Read-only file system" not in each.log.read_text()


def test_the_workers_image_makes_the_embedded_model_without_a_network(
    images: dict[str, Container],
) -> None:
    image = images["worker-cpu"]
    command = ["python", "-m", "default_model", "--cache", "/cache"]
    line = image.command(volumes={}, entrypoint=command)
    alone = ["/usr/bin/unshare", "--net", *line]
    ran = subprocess.run(
        alone, env=image.variables, capture_output=True, text=True, timeout=patience(120)
    )
    assert ran.returncode == 0 and "SmolLM2" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_gateway_and_scheduler_are_small_and_hold_no_torch(
    images: dict[str, Container], name: str
) -> None:
    image = images[name]
    sizes = [path.lstat().st_blocks * 512 for path in image.root.rglob("*")]
    print(f"{name}: {sum(sizes) / 1e6:.0f} MB")
    assert sum(sizes) / 1e6 < MAX_MB
    installed = distributions(image)
    assert "pagewire" in installed and not {"torch", "triton", "transformers"} & installed
    assert not [path for path in image.root.rglob("*torch*") if path.is_dir()]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_an_image_without_torch_has_python_and_no_other_program(
    images: dict[str, Container], name: str
) -> None:
    root = images[name].root
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.parent.name in ("bin", "sbin")
    }
    programs = {name for name in found if name.startswith(("usr/", "bin/"))}
    assert {Path(name).name.rstrip("0123456789.") for name in programs} == {"python"}
    assert "pip" not in distributions(images[name])


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_holds_only_root_may_write(images: dict[str, Container], name: str) -> None:
    root = images[name].root
    wrong = []
    for folder, folders, names in os.walk(root):
        for path in (Path(folder) / each for each in (*folders, *names)):
            inside, about = path.relative_to(root).as_posix(), path.lstat()
            if stat.S_ISLNK(about.st_mode) or inside in ("tmp", "cache"):
                continue
            if about.st_uid or about.st_mode & (stat.S_IWOTH | stat.S_ISUID | stat.S_ISGID):
                wrong.append(f"{inside}: {about.st_uid} {stat.filemode(about.st_mode)}")
    assert wrong == []
    assert (root / "cache").stat().st_uid == UID


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_the_package_and_nothing_of_the_checkout_else(
    images: dict[str, Container], name: str
) -> None:
    root = images[name].root
    (packages,) = root.glob(PACKAGES)
    assert (packages / "pagewire" / "_services" / "gateway" / "process" / "server.py").is_file()
    assert not (root / "src").exists() and not (root / "dist").exists()
    assert (root / "licenses" / "pagewire").read_text() == (ROOT / "LICENSE").read_text()
    unlicensed = [
        each.name
        for each in metadata.distributions(path=[str(packages)])
        if not _says_its_license(each)
    ]
    assert unlicensed == []


def _says_its_license(distribution: metadata.Distribution) -> bool:
    about = distribution.metadata
    classified = any("License" in each for each in about.get_all("Classifier", []))
    files = [file for file in distribution.files or [] if "licen" in str(file).lower()]
    return bool(about.get("License") or about.get("License-Expression") or classified or files)


def test_the_list_of_contents_names_what_is_installed(
    replays: dict[str, Replay], images: dict[str, Container]
) -> None:
    (listed,) = replays["gateway"].stage("sbom").iterdir()
    contents = json.loads(listed.read_text())
    assert (contents["bomFormat"], listed.name) == ("CycloneDX", "pagewire-gateway.cdx.json")
    names = {part["name"].lower().replace("_", "-") for part in contents["components"]}
    installed = {name.replace("_", "-") for name in distributions(images["gateway"])}
    assert installed <= names
