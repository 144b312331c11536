"""The wheel in an environment of its own, outside any checkout, serves without a clash of names."""

from pathlib import Path

import pytest

from default_model.folder import ensure
from tests.packaging.wheels import Environment, build_wheel, install
from tests.ports import free_port
from tests.tiny_model import FEW_WORDS, save_tiny_model

PORTS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
NO_KERNELS = "no CPU kernels, torch computes everything"
TAKEN = ("gateway", "kernels", "scheduler_svc", "wire", "worker_svc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which other distributions own the names of the services' packages."""
    environment = install(wheel, tmp_path_factory.mktemp("environment") / "venv")
    for name in TAKEN:
        _take(environment.site_packages / name)
    metadata = environment.site_packages / "kernels-0.18.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", ensure(), FEW_WORDS)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory that has folders of the services' names, too."""
    for name in TAKEN:
        _take(tmp_path / name)
    return tmp_path


def _take(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a foreign package was imported')\n")


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False])
def test_the_wheel_serves_tokens_from_anywhere(
    installed: Environment, model: Path, elsewhere: Path, has_compiler: bool
) -> None:
    ports = [word for option in PORTS for word in (option, str(free_port()))]
    (elsewhere / "no programs").mkdir()
    path = {} if has_compiler else {"PATH": str(elsewhere / "no programs")}
    logs = elsewhere / "logs"
    ran = installed.run(
        *("up", "--once", "--model", str(model), "--dtype", "float32", *ports),
        *("--log-dir", str(logs), "--worker-options=--kv-cache-gib 0.1"),
        cwd=elsewhere,
        **path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer = ran.stdout.partition("What is the capital of Japan?")[2].partition("stopping")[0]
    assert answer.strip()
    assert (NO_KERNELS in (logs / "worker.log").read_text()) is not has_compiler


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_each_service_is_a_command_of_the_package(
    installed: Environment, elsewhere: Path, service: str
) -> None:
    ran = installed.run("serve", service, "--no-such-option", cwd=elsewhere)
    assert ran.returncode == 2
    assert "--no-such-option" in ran.stderr or "required: --" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_commands_of_the_services_code_run_from_the_package(
    installed: Environment, elsewhere: Path
) -> None:
    line = "keys new --name a --tenant t --role user"
    made = installed.run(*line.split(), cwd=elsewhere)
    assert made.stdout.startswith("pw_a_"), made.stderr
    line = "simulate --rate 5 --requests 3 --step-time 0.01,0,0 --output-tokens 3:5"
    simulated = installed.run(*line.split(), cwd=elsewhere)
    assert simulated.returncode == 0, simulated.stderr
    benched = installed.run("bench", "throughput", cwd=elsewhere)
    assert "holds no benchmarks: a checkout of the repository does" in benched.stderr


def test_a_client_alone_says_what_the_services_need(wheel: Path, tmp_path: Path) -> None:
    client = install(wheel, tmp_path / "venv", "grpc", "google", "typing_extensions.py")
    refused = client.run("up", cwd=tmp_path)
    assert refused.returncode == 1
    assert "torch" in refused.stderr and 'pip install "pagewire[serve]"' in refused.stderr
    refused = client.run("serve", "scheduler", cwd=tmp_path)
    assert "xxhash" in refused.stderr and 'pip install "pagewire[scheduler]"' in refused.stderr
    assert "torch" not in refused.stderr
