"""`pagewire up --tls --api-keys`: TLS on all ports, and roles on each service."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import pagewire
from kernels.cpu.build import cache_folder
from pagewire.cli.launcher.certificates import make_certificates
from tests.e2e.conftest import ROOT, environment_of_users
from tests.pace import patience
from tests.ports import free_port
from wire.identity.keys import new_key
from wire.identity.roles import METHOD_ROLES, Role

SERVICES = ("worker", "scheduler", "grpc")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
OF_SERVICE = {
    "grpc": ("InferenceService", "EmbeddingService", "DebugService"),
    "scheduler": ("SchedulerService", "DebugService"),
    "worker": ("WorkerService", "DebugService"),
}
Code = grpc.StatusCode


@dataclass(slots=True)
class Secured:
    """One run of `pagewire up`."""

    folder: Path
    model: Path
    ports: dict[str, int] = field(
        default_factory=lambda: {name: free_port() for name in ("http", *SERVICES)}
    )
    probes: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in SERVICES})
    keys: dict[str, str] = field(default_factory=dict)
    printed: str = ""

    @property
    def ca(self) -> Path:
        return self.folder / "tls" / "ca.pem"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def environment(self, key: str) -> dict[str, str]:
        return environment_of_users(
            PAGEWIRE_API_KEY=self.keys[key],
            PAGEWIRE_CACHE="",
            XDG_CACHE_HOME=str(self.cache),
            PYTHONPATH=str(ROOT),
        )

    def write_keys(self) -> Path:
        file = self.folder / "keys"
        made = {
            "user": new_key("user", "acme", [Role.USER]),
            "operator": new_key("operator", "infra", [Role.OPERATOR]),
        }
        file.write_text("\n".join(entry.line() for _, entry in made.values()))
        self.keys = {name: key for name, (key, _) in made.items()}
        return file

    def command(self, *words: str, key: str = "user") -> subprocess.CompletedProcess[str]:
        """Runs a command of pagewire."""
        return subprocess.run(
            [sys.executable, "-m", "pagewire", *words],
            capture_output=True,
            text=True,
            env=self.environment(key),
            timeout=patience(60),
            check=False,
        )

    def code(self, service: str, method: str, secret: str | None) -> grpc.StatusCode:
        """The status with which a service answers a call with an empty request."""
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        address = f"127.0.0.1:{self.ports[service]}"
        metadata = [] if secret is None else [("authorization", f"Bearer {secret}")]
        with grpc.secure_channel(address, credentials) as channel:
            call = channel.unary_stream(method)(b"", timeout=patience(20), metadata=metadata)
            with suppress(grpc.RpcError):
                list(call)
            found: grpc.StatusCode = call.code()
            return found

    def https(self, path: str, key: str | None, body: object = None) -> tuple[int, bytes]:
        """Status and body of an HTTP request."""
        headers = {} if key is None else {"authorization": f"Bearer {self.keys[key]}"}
        found = httpx.request(
            "GET" if body is None else "POST",
            f"https://localhost:{self.ports['http']}{path}",
            json=body,
            headers=headers,
            timeout=patience(20),
            verify=ssl.create_default_context(cafile=self.ca),
        )
        return found.status_code, found.content


@pytest.fixture(scope="module")
def up(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    secured = Secured(tmp_path_factory.mktemp("secured"), terse_model)
    (secured.cache / "pagewire").mkdir(parents=True)
    compiled = cache_folder(os.environ)  # by other tests
    compiled.mkdir(parents=True, exist_ok=True)
    (secured.cache / "pagewire" / "kernels").symlink_to(compiled)
    words = ["--tls", "--api-keys", str(secured.write_keys()), "--model", str(terse_model)]
    words += ["--device", "cpu", "--dtype", "float32", "--log-dir", str(secured.folder)]
    probes = {name: f"--health-port {port}" for name, port in secured.probes.items()}
    words += [f"--worker-options=--threads 1 --kv-cache-gib 0.2 {probes['worker']}"]
    words += [f"--scheduler-options={probes['scheduler']}", f"--gateway-options={probes['grpc']}"]
    for name, port in secured.ports.items():
        words += [f"--{name}-port", str(port)]
    run = subprocess.Popen(
        [sys.executable, "-m", "pagewire", "up", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=secured.environment("user"),
    )
    limit = threading.Timer(patience(180), run.kill)
    limit.start()
    try:
        assert run.stdout is not None
        for line in run.stdout:
            secured.printed += line
            if "Chat" in line:  # the last one of the invitation
                break
        assert "Ready." in secured.printed, secured.printed
        yield secured
    finally:
        limit.cancel()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=patience(60))
        assert not list(secured.cache.glob("pagewire/peers/*"))


def test_the_sample_question_was_answered_and_how_to_go_on_names_the_ca(up: Secured) -> None:
    assert "capital of Japan" in up.printed
    assert f"curl --cacert {up.ca} https://" in up.printed
    assert f"grpcurl -cacert {up.ca}" in up.printed
    assert up.keys["user"] not in up.printed


def test_clients_with_the_ca_and_a_key_are_served(up: Secured) -> None:
    target, tls = f"localhost:{up.ports['grpc']}", pagewire.TLS(up.ca)
    with pagewire.Client(target, api_key=up.keys["user"], tls=tls) as client:
        assert client.chat("Hello", max_tokens=4).text
    status, body = up.https("/v1/chat/completions", "user", CHAT)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
    chatted = up.command("complete", "Hello", "--max-tokens", "4", "--target", target,
                         "--tls", "--ca-cert", str(up.ca))  # fmt: skip
    assert chatted.returncode == 0 and chatted.stdout.strip(), chatted.stderr
    where = ["--scheduler", f"localhost:{up.ports['scheduler']}", "--ca-cert", str(up.ca)]
    status_of = up.command("status", "--target", target, *where)
    assert status_of.stdout.count(" ready") == 3, status_of.stdout + status_of.stderr


def test_plaintext_and_another_ca_reach_no_port(up: Secured, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    credentials = grpc.ssl_channel_credentials(other.ca.read_bytes())
    for service in SERVICES:
        address = f"localhost:{up.ports[service]}"
        for channel in (
            grpc.insecure_channel(address),
            grpc.secure_channel(address, credentials),
        ):
            with channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=patience(5))
            assert caught.value.code() is Code.UNAVAILABLE
    url = f"localhost:{up.ports['http']}/health"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{url}", timeout=patience(5))
    context = ssl.create_default_context(cafile=other.ca)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{url}", timeout=patience(5), verify=context)


@pytest.mark.parametrize("service", OF_SERVICE)
def test_a_health_port_answers_probes_in_plaintext_and_nothing_else(
    service: str, up: Secured
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{up.probes[service]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness"):
            request = health_pb2.HealthCheckRequest(service=name)
            answer = stub.Check(request, timeout=patience(20))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for method in METHOD_ROLES:
            if method != "/grpc.health.v1.Health/Check":
                call = channel.unary_stream(method)(b"", timeout=patience(20))
                assert call.code() is Code.UNIMPLEMENTED, method


@pytest.mark.parametrize("service", OF_SERVICE)
def test_each_call_that_is_not_for_users_is_refused_to_their_keys(
    service: str, up: Secured
) -> None:
    methods = [
        method
        for method, role in METHOD_ROLES.items()
        if role in (Role.OPERATOR, Role.PEER)
        and method.split("/")[1].removeprefix("pagewire.v1.") in OF_SERVICE[service]
    ]
    assert len(methods) >= 5
    for method in methods:
        assert up.code(service, method, None) is Code.UNAUTHENTICATED, method
        assert up.code(service, method, "wrong") is Code.UNAUTHENTICATED, method
        assert up.code(service, method, up.keys["user"]) is Code.PERMISSION_DENIED, method
        if METHOD_ROLES[method] is Role.PEER:
            assert up.code(service, method, up.keys["operator"]) is Code.PERMISSION_DENIED, method


def test_operators_and_the_peer_token_are_let_in(up: Secured) -> None:
    for service, method in (
        ("grpc", "DebugService/ListRequests"),
        ("scheduler", "SchedulerService/GetStatus"),
        ("scheduler", "SchedulerService/Abort"),
        ("scheduler", "SchedulerService/ResetPrefixCache"),
        ("worker", "WorkerService/Describe"),
    ):
        assert up.code(service, f"/pagewire.v1.{method}", up.keys["operator"]) is Code.OK, method
    (token,) = up.cache.glob("pagewire/peers/*.token")
    assert token.stat().st_mode & 0o777 == 0o600
    method = "/pagewire.v1.SchedulerService/GetStatus"
    assert up.code("scheduler", method, token.read_text().strip()) is Code.OK
    assert up.code("grpc", "/pagewire.v1.InferenceService/ListModels", up.keys["operator"]) is (
        Code.PERMISSION_DENIED
    )
    assert up.https("/v1/models", None)[0] == 401
    assert up.https("/v1/models", "operator")[0] == 403


def test_a_certificate_swapped_on_disk_is_served_and_peers_follow(
    up: Secured, tmp_path: Path
) -> None:
    before, other = up.ca.read_bytes(), make_certificates(tmp_path)
    for name in ("key", "cert", "ca"):  # each at once, the authority last
        fresh = tmp_path / "new"
        shutil.copy(getattr(other, name), fresh)
        fresh.replace(up.ca.with_name(f"{name}.pem"))
    assert up.ca.read_bytes() != before
    for port in up.ports.values():
        shown = ssl.get_server_certificate(("127.0.0.1", port), timeout=patience(5))
        assert shown.strip() == other.cert.read_text().strip()
    assert up.https("/v1/chat/completions", "user", CHAT)[0] == 200
