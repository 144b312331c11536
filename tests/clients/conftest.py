"""The live stack that all clients call. It runs in the environment that has the services."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pace import SERVING, patience

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = patience(600)
STOP_TIMEOUT_S = patience(120)

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would ask the network


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway, without /v1."""
    yield from started(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="session")
def long_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with a model that reads the long prompts of agents, and answers briefly."""
    yield from started(tmp_path_factory.mktemp("long"), "--long")


def started(folder: Path, *options: str) -> Iterator[str]:
    """The address of a stack that runs meanwhile."""
    environ = {name: value for name, value in os.environ.items() if name != SERVING}
    serving = os.environ.get(SERVING, sys.executable)
    process = subprocess.Popen(
        [serving, "-m", "tests.clients.stack", str(folder), *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http"), "the stack did not start"
        yield address
    finally:
        process.stdin.close()
        assert process.wait(STOP_TIMEOUT_S) == 0


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    """The address as OpenAI's clients take it."""
    return f"{url}/v1"
