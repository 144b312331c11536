"""`pagewire up --model ORG/NAME`: from an empty cache to a token, by a stand-in of the hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment_of_users
from tests.pace import patience
from tests.pagewire.hub.stand_in import Repository, running_hub
from tests.ports import free_port

pytestmark = pytest.mark.slow
PORTS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
SMALL = "--worker-options=--threads 1 --kv-cache-gib 0.2"


def test_a_model_of_a_hub_is_served_by_its_name(terse_model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in terse_model.iterdir()}
    with running_hub() as hub:
        hub.repositories["org/tiny"] = Repository({"main": files})
        environ = environment_of_users(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
        environ.pop("HF_HUB_OFFLINE", None)
        ports = (word for name in PORTS for word in (name, str(free_port())))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pagewire", "up", "--once", "--model", "org/tiny@main"),
                *("--device", "cpu", "--dtype", "float32", SMALL, *ports),
            ],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(120),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = done.stdout.partition("What is the capital of Japan?\n")[2]
    assert answer.partition("\nstopping")[0].strip(), done.stdout
    assert "model     org/tiny" in done.stdout
