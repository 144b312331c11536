"""The site of the chart's tests: the stand-in, or the cluster that KUBECONFIG names.

A real cluster takes its images from PAGEWIRE_TEST_REGISTRY, with the tag PAGEWIRE_TEST_TAG, and
serves the embedded model. Its gateway is called at PAGEWIRE_TEST_ADDRESS, or where its load
balancer or, from one of its nodes, its Service is.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.cluster.standin import Client, StandIn
from tests.e2e.failures.twins import Seen, Streams, TwinRequest
from tests.pace import patience

CHART = Path(__file__).parents[3] / "deploy" / "k8s" / "chart"
HTTP_PORT, GRPC_PORT = 8000, 50051


@dataclass(slots=True)
class Release:
    """The chart, installed once."""

    client: Client
    values: tuple[str, ...]
    stand_in: StandIn | None
    namespace: str = field(default_factory=lambda: f"pagewire-{uuid.uuid4().hex[:6]}")
    name: str = "demo"

    def helm(self, command: str, *line: str) -> str:
        """Runs helm for this release; asserts that it succeeds."""
        words = (command, self.name, *line, "--namespace", self.namespace)
        ran = self.client.helm(*words)
        assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}\n{self.words()}"
        return ran.stdout

    def install(self) -> str:
        """Installs it and waits until all is ready."""
        waits = ("--create-namespace", "--wait", *self._limit)
        return self.helm("install", str(CHART), *self.values, *waits)

    def upgrade(self, *changes: str) -> str:
        """Upgrades it by `--set`, and waits."""
        words = [word for change in changes for word in ("--set", change)]
        waits = ("--reuse-values", "--wait", *self._limit)
        return self.helm("upgrade", str(CHART), *words, *waits)

    @property
    def _limit(self) -> tuple[str, str]:
        return "--timeout", f"{patience(30):.0f}s"

    @property
    def host(self) -> str:
        """The address at which the gateway's Service is reached from here."""
        if given := os.environ.get("PAGEWIRE_TEST_ADDRESS"):
            return given
        service = self.get("service", f"{self.name}-pagewire-gateway")
        balanced = service.get("status", {}).get("loadBalancer", {}).get("ingress", [])
        return str(balanced[0]["ip"] if balanced else service["spec"]["clusterIP"])

    def get(self, kind: str, name: str = "") -> dict[str, Any]:
        """An object, or a list of all, as kubectl shows it."""
        words = ("get", kind, *filter(None, [name]), "--namespace", self.namespace, "-o", "json")
        ran = self.client.kubectl(*words)
        assert ran.returncode == 0, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    def pods(self, tier: str) -> list[dict[str, Any]]:
        """Its pods of one tier."""
        label = "app.kubernetes.io/component"
        items = self.get("pods")["items"]
        return [pod for pod in items if pod["metadata"]["labels"].get(label) == tier]

    def logs(self, pod: str) -> str:
        """The words of a pod."""
        words = ("logs", pod, "--namespace", self.namespace)
        return self.client.kubectl(*words).stdout

    def words(self) -> str:
        """The words of pods, where they are known after their end."""
        stand_in = self.stand_in
        return "" if stand_in is None else "\n".join([stand_in.words(), *stand_in.failures()])

    def words_of(self, tier: str) -> str:
        """All that pods of a tier have said in the stand-in, those that are gone included."""
        assert self.stand_in is not None
        files = self.stand_in.kubelet.log_files()
        return "".join(path.read_text(errors="replace") for path in files if path.stem == tier)

    def answer(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """The answer to a prompt, through the Service."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        url = f"http://{self.host}:{HTTP_PORT}/v1/completions"
        answered = httpx.post(url, json=body, timeout=patience(60)).raise_for_status()
        found: dict[str, Any] = answered.json()
        return found

    def start(self, requests: Sequence[TwinRequest]) -> Streams:
        """Streams of these requests, through the Service."""
        return Streams(requests, HTTP_PORT, GRPC_PORT, self.host)

    def run(self, requests: Sequence[TwinRequest]) -> list[Seen]:
        """The same, to their ends."""
        return self.start(requests).wait()

    def is_answered(self) -> bool:
        """True if the gateway says that it is ready."""
        with contextlib.suppress(httpx.TransportError):
            url = f"http://{self.host}:{HTTP_PORT}/ready"
            return httpx.get(url, timeout=patience(2)).is_success
        return False

    def wait_until_answered(self) -> None:
        """Waits for it."""
        deadline_s = time.monotonic() + patience(60)
        while not self.is_answered():
            assert time.monotonic() < deadline_s, self.words()
            time.sleep(0.1)
