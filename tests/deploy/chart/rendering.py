"""The chart rendered by the real helm, for each of the sets of values in `values/`."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pace import patience

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "k8s" / "chart"
VALUES = Path(__file__).parent / "values"
SETS = sorted(path.stem for path in VALUES.glob("*.yaml"))
TOOLS = Path(os.environ.get("PAGEWIRE_DEPLOY_TOOLS", ROOT / ".venv-deploy"))
TOKEN = re.compile(r"^(  token: )\S{64}$", re.MULTILINE)

Object = dict[str, Any]


def tool(name: str) -> str:
    """The path of a tool; fails where `make test-deploy` has not fetched it.

    Skips the test where that said that this machine cannot have it.
    """
    path, missing = TOOLS / "bin" / name, TOOLS / "missing.txt"
    for line in missing.read_text().splitlines() if missing.exists() else ():
        absent, reason = line.split(": ", 1)
        if absent == name or not path.parent.exists():
            pytest.skip(f"{absent}: {reason}")
    assert path.exists(), f"{path} is missing: run `make test-deploy`, which fetches it"
    return str(path)


def run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it said."""
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(120),
        env={**os.environ, "PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}"},
    )


def helm_template(*options: str) -> subprocess.CompletedProcess[str]:
    """`helm template` of a release named demo."""
    return run(tool("helm"), "template", "demo", str(CHART), "--namespace=llm", *options)


@cache
def rendered_text(name: str) -> str:
    """The text that helm renders for a set of values; the random token is replaced."""
    done = helm_template("--values", str(VALUES / f"{name}.yaml"))
    assert done.returncode == 0, done.stderr
    return TOKEN.sub(r"\1RANDOM", done.stdout)


def rendered(name: str) -> list[Object]:
    """The objects of a set of values; new ones each time."""
    objects: list[Object] = json.loads(_parsed(name))
    return objects


@cache
def _parsed(name: str) -> str:
    """Parsed once, and by C where it is: the parser in Python takes a fifth of a second."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return json.dumps([o for o in yaml.load_all(rendered_text(name), loader) if o])


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def pod_spec(workload: Object) -> Object:
    """The pod's spec of a workload or of a Pod."""
    spec: Object = workload["spec"]
    return spec if workload["kind"] == "Pod" else spec["template"]["spec"]


def pods(objects: list[Object]) -> list[Object]:
    """Everything that starts pods."""
    return of_kind(objects, "Deployment", "StatefulSet", "Pod")
