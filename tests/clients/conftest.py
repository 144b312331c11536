"""The live stack that all clients call. It runs in the environment that has the services."""

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pace import SERVING, patience

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = patience(600)
STOP_TIMEOUT_S = patience(120)
PICTURED, WORDS, NUM_TOKENS = "pictured", "w5 w6", 8  # the model, and what it is asked
PICTURES = ("one.png", "two.png")  # that the stack writes

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would ask the network


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway, without /v1."""
    yield from started(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="session")
def long_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with a model that reads the long prompts of agents, and answers briefly."""
    yield from started(tmp_path_factory.mktemp("long"), "--long")


@dataclass(frozen=True, slots=True)
class Pictured:
    """A gateway whose model takes pictures, and two of these as files."""

    url: str
    folder: Path

    @property
    def files(self) -> list[bytes]:
        """The contents of both."""
        return [(self.folder / name).read_bytes() for name in PICTURES]

    def text_of(self, content: bytes) -> str:
        """The text that a plain request with words and a picture gets."""
        user = {"role": "user", "content": chat_parts(content)}
        body = {"model": PICTURED, "messages": [user], "max_tokens": NUM_TOKENS, "temperature": 0}
        asked = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=patience(120)) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def data_url(content: bytes) -> str:
    """A picture as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def chat_parts(content: bytes) -> list[dict[str, Any]]:
    """Words and a picture as OpenAI's chats have them."""
    picture = {"type": "image_url", "image_url": {"url": data_url(content)}}
    return [{"type": "text", "text": WORDS}, picture]


@pytest.fixture(scope="session")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    """A gateway to which clients can send pictures."""
    folder = tmp_path_factory.mktemp("pictured")
    for address in started(folder, "--pictured"):
        yield Pictured(address, folder)


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
