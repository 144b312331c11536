"""Clients of npm: the AI SDK's providers, the openai package, Claude Code, Codex and opencode.

They are in .venv-clients/node, where `make test-clients` installs them if npm is there. The agents
run as they come, each with a home of its own, and reach nothing but the gateway.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PICTURES, WORDS, Pictured
from tests.pace import patience

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv-clients" / "node"
SCRIPTS = Path(__file__).parent / "node"
NO_NETWORK = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (INSTALLED / "node_modules").is_dir(),
    reason="npm's clients are not here: make test-clients, with npm",
)


def ran(command: list[str], timeout_s: float = 300, may_fail: bool = False, **more: Any) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(timeout_s),
        stdin=subprocess.DEVNULL,
        **more,
    )
    assert may_fail or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def told(script: str, *arguments: str) -> dict[str, Any]:
    """The last line of a script, which is JSON."""
    lines = ran(["node", str(SCRIPTS / script), str(INSTALLED), *arguments]).strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.parametrize("kind", ["openai", "chat", "anthropic"])
def test_the_ai_sdk_goes_on_with_its_calls_and_results(kind: str, url: str) -> None:
    """Its default model names the items of earlier answers by their ids."""
    answer = told("ai_sdk.mjs", url, kind)
    assert answer["calls"] == ["look"] and answer["results"] == ["seen"]
    assert answer["numParts"] > 2
    assert answer["finish"] in ("stop", "length")


@pytest.mark.parametrize("kind", ["openai", "chat", "anthropic"])
def test_the_ai_sdk_sends_pictures_as_they_are(kind: str, pictured: Pictured) -> None:
    texts = [
        told("picture.mjs", pictured.url, kind, str(pictured.folder / name), WORDS)["text"]
        for name in PICTURES
    ]
    assert texts == [pictured.text_of(content) for content in pictured.files]


def test_the_openai_package(url: str) -> None:
    answer = told("openai.mjs", url)
    assert answer["numChunks"] > 2
    assert answer["calls"] == ["look"]
    assert answer["output"]


def binary(pattern: str) -> str:
    """The one program that a package of npm brought."""
    found = sorted(path for path in (INSTALLED / "node_modules").glob(pattern) if path.is_file())
    if not found:
        pytest.skip(f"{pattern} is not here")
    return str(found[0])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.txt").write_text("one line\n")
    return tmp_path


def agent(home: Path, command: list[str], **environ: str) -> str:
    """The output of an agent that runs in a project of its own.

    A model of no language seldom ends by itself: some agents call an answer that ends at its limit
    a failure.
    """
    own = {"PATH": os.environ["PATH"], "HOME": str(home), **NO_NETWORK, **environ}
    return ran(command, timeout_s=600, may_fail=True, cwd=home / "project", env=own)


@pytest.mark.parametrize("thinking", [{}, {"MAX_THINKING_TOKENS": "0"}], ids=["as it comes", "0"])
def test_claude_code(thinking: dict[str, str], long_url: str, home: Path) -> None:
    command = [binary("@anthropic-ai/claude-code-*/claude"), "-p", "Say hello.", "--output-format"]
    environ = {
        "ANTHROPIC_BASE_URL": long_url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "24",
    }
    said = json.loads(agent(home, [*command, "json"], **environ, **thinking))
    assert said["api_error_status"] is None and said["usage"]["output_tokens"], said
    assert not said["is_error"] or "output token maximum" in said["result"], said


def test_codex(long_url: str, home: Path) -> None:
    (home / "config.toml").write_text(
        f'model = "tiny"\nmodel_provider = "pagewire"\n[model_providers.pagewire]\n'
        f'name = "pagewire"\nbase_url = "{long_url}/v1"\nwire_api = "responses"\n'
    )
    command = [binary("@openai/codex-*/vendor/*/bin/codex"), "exec", "--skip-git-repo-check"]
    said = agent(home, [*command, "--json", "Say hello."], CODEX_HOME=str(home))
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    failures = [event["message"] for event in events if event["type"] == "error"]
    assert all("max_output_tokens" in failure for failure in failures), said
    items = [event["item"]["type"] for event in events if event["type"] == "item.completed"]
    assert {"agent_message", "reasoning"} & set(items), said


def test_opencode(long_url: str, home: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{long_url}/v1", "apiKey": "none"},
        "models": {"tiny": {"limit": {"context": 32768, "output": 24}}},
    }
    config = {"provider": {"pagewire": provider}, "model": "pagewire/tiny", "autoupdate": False}
    (home / "project" / "opencode.json").write_text(json.dumps(config))
    said = agent(home, [binary("opencode-linux-*/bin/opencode"), "run", "Say hello."])
    assert "Error" not in said
