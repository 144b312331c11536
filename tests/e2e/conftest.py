"""Fixtures: three service processes in float32, with the default model or a tiny one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict

import pagewire
from default_model.folder import ensure, ensure_file
from pagewire.cli.launcher.services import LOOPBACK, Settings, plan
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.forks import warm
from tests.pace import patience
from tests.ports import free_port
from tests.tiny_model import FEW_WORDS, save_tiny_model

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = patience(180.0)
STOP_TIMEOUT_S = patience(30.0)
SMALL = ("--threads", "1", "--kv-cache-gib", "0.3")  # a worker of a tiny model


def environment_of_users(**variables: str) -> dict[str, str]:
    """This process's environment without variables of the tests, plus `variables`."""
    own = {"OMP_NUM_THREADS"}
    return {name: value for name, value in os.environ.items() if name not in own} | variables


@dataclass(slots=True)
class Product:
    """The three running services; none of them is left after a `with` block."""

    model: Path
    logs: Path
    worker_options: tuple[str, ...] = ("--kv-cache-gib", "1")
    options: tuple[str, ...] = ()  # of every service
    environ: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    watched: tuple[str, ...] = ()  # modules whose event loop is watched
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    scheduler_port: int = field(default_factory=free_port)
    worker_port: int = field(default_factory=free_port)
    scheduler_metrics_port: int = field(default_factory=free_port)
    worker_metrics_port: int = field(default_factory=free_port)
    processes: dict[str, warm.Started] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        """Starts the three services and waits until they serve."""
        self.start_worker()
        self.start_scheduler()
        self.start_gateway()
        self.wait_until_ready()

    def start_worker(self, *options: str, port: int | None = None, name: str = "") -> None:
        metrics = () if port else ("--metrics-port", str(self.worker_metrics_port))
        settings = replace(
            self._settings,
            worker_port=port or self.worker_port,
            worker_options=(*self.worker_options, *self.options, *options, *metrics),
        )
        self._start(settings, "worker_svc", name)

    def start_scheduler(self, *options: str, worker_port: int | None = None) -> None:
        metrics = ("--metrics-port", str(self.scheduler_metrics_port))
        options = ("--state-check-interval", "8", *metrics, *self.options, *options)
        port = worker_port or self.worker_port
        settings = replace(self._settings, scheduler_options=options, worker_port=port)
        self._start(settings, "scheduler_svc")

    def start_gateway(self) -> None:
        self._start(self._settings, "gateway")

    @property
    def _settings(self) -> Settings:
        return Settings(
            host=LOOPBACK,
            http_port=self.http_port,
            grpc_port=self.grpc_port,
            scheduler_port=self.scheduler_port,
            worker_port=self.worker_port,
            dtype="float32",
            device=self.device,
            gateway_options=self.options,
        )

    def _start(self, settings: Settings, module: str, name: str = "") -> None:
        """Starts a service of `pagewire up`, without a guard: tests kill and stop it themselves."""
        name = name or module
        spec = next(spec for spec in plan(settings, self.model) if spec.module == module)
        path, environ = self.logs / f"{name}.log", environment_of_users(**self.environ)
        # Libraries may read variables of its own when they are imported; OpenTelemetry is imported
        # later. Ranks of a killed worker end a moment after it: a fork would start sooner, and
        # find their ports in use.
        reads_late = all(variable.startswith("OTEL_") for variable in self.environ)
        has_ranks = any("tensor-parallel-size" in word for word in spec.arguments)
        if module in self.watched:
            started = ["tests.e2e.stretches", str(self.report_of(module)), module]
        elif module in warm.LIBRARIES and reads_late and not has_ranks:
            self.processes[name] = warm.start(module, spec.arguments, ROOT, path, environ)
            return
        else:
            started = ["tests.e2e.forks.ranks" if has_ranks and reads_late else module]
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *started, *spec.arguments],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=environ,
            )

    def report_of(self, module: str) -> Path:
        """The file in which a watched service notes its stretches."""
        return self.logs / f"{module}.stretches"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                assert process.poll() is None, self.log_of(name)
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=patience(2)).is_success:
                    return
            time.sleep(0.2)
        raise AssertionError("not ready: " + "".join(map(self.log_of, self.processes)))

    def log_of(self, name: str) -> str:
        return f"--- {name}\n{self.read_log(name)[-4000:]}\n"

    def read_log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def stop(self) -> dict[str, int]:
        """Stops the services with SIGTERM; returns their exit codes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        codes = {n: p.wait(STOP_TIMEOUT_S) for n, p in self.processes.items()}
        self.processes.clear()
        return codes

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def kill_worker(self) -> None:
        """Kills the worker, and waits until it is gone."""
        self.processes["worker_svc"].kill()
        self.processes["worker_svc"].wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def post(
        self, path: str, body: object, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """The answer to a JSON body, whatever its status."""
        url = f"{self.url}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=patience(300))

    def sdk(self) -> pagewire.Client:
        """A client that waits for as long as an answer takes among a crowd."""
        return pagewire.Client(f"127.0.0.1:{self.grpc_port}", timeout_s=patience(240))

    def grpcurl(self, port: int, *arguments: str, data: object = None) -> str:
        """The output of grpcurl; asserts that it succeeds."""
        done = self.run_grpcurl(port, *arguments, data=data)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_grpcurl(
        self, port: int, *arguments: str, data: object = None
    ) -> subprocess.CompletedProcess[str]:
        beside = Path(sys.executable).parent / "grpcurl"
        command = [str(beside) if beside.exists() else str(shutil.which("grpcurl")), "-plaintext"]
        if data is not None:
            command += ["-d", json.dumps(data)]
        command += [f"127.0.0.1:{port}", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=patience(60), check=False
        )

    def status(self) -> dict[str, Any]:
        """The scheduler's status, as grpcurl would write it, without a process for it."""
        with grpc.insecure_channel(f"127.0.0.1:{self.scheduler_port}") as channel:
            answer = scheduler_pb2_grpc.SchedulerServiceStub(channel).GetStatus(
                scheduler_pb2.GetStatusRequest(), timeout=patience(60), wait_for_ready=True
            )
        return MessageToDict(answer, preserving_proto_field_name=True)


def wait_until_all_is_free(product: Product) -> None:
    """Waits until no request is live and every block is free: steps under way still hold some."""
    deadline_s = time.monotonic() + patience(30)
    while True:
        status = product.status()
        is_idle = not status.get("num_running") and not status.get("num_waiting")
        if is_idle and status["num_free_blocks"] == status["num_blocks"]:
            return
        assert time.monotonic() < deadline_s, status
        time.sleep(0.05)


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model as a Hugging Face folder, from which transformers computes."""
    return ensure()


@pytest.fixture(scope="session")
def tiny_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the default model's tokenizer, for tests without language."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", model)


@pytest.fixture(scope="session")
def terse_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with few of its words, for tests that start services again and again.

    Worker and gateway read all words when they start, twice: more than a second in place of 0.1.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny_model(folder, model, FEW_WORDS)


@contextmanager
def serving(model: Path, logs: Path, worker_options: tuple[str, ...]) -> Iterator[Product]:
    os.environ.pop("OPENAI_API_KEY", None)
    with Product(model, logs, worker_options) as running:
        running.start()
        yield running
        assert running.stop() == {"worker_svc": 0, "scheduler_svc": 0, "gateway": 0}


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """The default model's file, shared by all tests that depend on the content of answers."""
    with serving(
        ensure_file(), tmp_path_factory.mktemp("logs"), ("--kv-cache-gib", "1")
    ) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_product(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """The tiny model, shared by all other tests."""
    with serving(tiny_model, tmp_path_factory.mktemp("tiny-logs"), SMALL) as running:
        yield running
