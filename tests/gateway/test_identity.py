"""API keys from a file: whose requests they are, what a role may do, TLS on both ports."""

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.request.generation import Standing
from pagewire.cli.launcher.certificates import make_certificates
from pagewire.v1 import (
    debug_pb2,
    debug_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    inference_pb2_grpc,
)
from pagewire.v1 import inference_pb2 as pb
from tests.pace import patience
from tests.ports import free_port
from wire.health_port import LIVENESS
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/messages": CHAT,
}
STREAMED = {route: body | {"stream": True} for route, body in ROUTES.items() if "emb" not in route}
NAMES = {"alice": ("acme", [Role.USER]), "bob": ("globex", [Role.USER])}
NAMES |= {"ops": ("infra", [Role.OPERATOR])}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A file of keys, and the keys by name."""
    made = {name: new_key(name, *of) for name, of in NAMES.items()}
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\n".join(entry.line() for _, entry in made.values()))
    return file, {name: f"Bearer {key}" for name, (key, _) in made.items()}


async def health(channel: grpc.aio.Channel, service: str = "") -> health_pb2.HealthCheckResponse:
    """Raises AioRpcError unless health answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return await stub.Check(request, timeout=patience(5))


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(start: Callable[..., Any], keys: Any) -> Any:
    running = await start(identity=IdentityOptions(api_keys=keys[0]))
    await running.http.get("/ready")
    return running


async def test_tenant_id_and_salt_are_the_keys_on_every_route(guarded: Any, keys: Any) -> None:
    for route, body in (*ROUTES.items(), *STREAMED.items()):
        found = []
        for name in ("alice", "alice", "bob"):
            headers = {"authorization": keys[1][name], "x-request-id": "same"}
            response = await guarded.http.post(route, json=body, headers=headers)
            assert response.status_code == 200, response.text
            assert "acme/" not in response.text
            found.append(guarded.scheduler.submits[-1])
        assert [submit.tenant for submit in found] == ["acme", "acme", "globex"]
        assert [submit.request_id.partition("/")[0] for submit in found[1:]] == ["acme", "globex"]
        salts = [submit.cache_salt for submit in found]
        assert salts[0] == salts[1] != salts[2]
        assert all(salts)


async def test_tenant_id_and_salt_are_the_keys_on_every_grpc_call(guarded: Any, keys: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(guarded.channel)
    embedder = embedding_pb2_grpc.EmbeddingServiceStub(guarded.channel)
    options = pb.GenerationOptions(request_id="same", cache_salt="red")
    prompt = pb.Prompt(text="Hello")
    salts = set()
    for name, tenant in (("alice", "acme"), ("bob", "globex")):
        metadata = (("authorization", keys[1][name]),)
        await stub.Generate(pb.GenerateRequest(prompt=prompt, options=options), metadata=metadata)
        stream = stub.GenerateStream(
            pb.GenerateStreamRequest(prompt=prompt, options=options), metadata=metadata
        )
        assert [part async for part in stream]
        asked = embedding_pb2.EmbedRequest(inputs=[prompt], request_id="same")
        await embedder.Embed(asked, metadata=metadata)
        for submit in guarded.scheduler.submits[-3:]:
            assert (submit.tenant, submit.request_id.partition("/")[0]) == (tenant, tenant)
        salts |= {submit.cache_salt for submit in guarded.scheduler.submits[-3:]}
    assert len(salts) == 4  # of two tenants, each with "red" and without a salt of its own


async def test_the_first_token_is_explained_by_the_id_that_operators_see(
    guarded: Any, keys: Any
) -> None:
    for name in ("alice", "bob"):
        headers = {"authorization": keys[1][name], "x-request-id": "same"}
        await guarded.http.post("/v1/completions", json=ROUTES["/v1/completions"], headers=headers)
    kept = guarded.gateway._pipeline.first_tokens
    found = [kept.find(f"{tenant}/same") for tenant in ("acme", "globex")]
    assert all(found) and found[0] != found[1]
    assert kept.find("same") is None


async def test_another_tenant_cannot_be_named_and_the_own_one_can(guarded: Any, keys: Any) -> None:
    own = {"authorization": keys[1]["alice"]}
    ask = guarded.http.post
    body = ROUTES["/v1/completions"] | {"user": "eve"}
    right = await ask("/v1/completions", json=body, headers=own | {"x-tenant": "acme"})
    assert right.status_code == 200
    assert guarded.scheduler.submits[-1].tenant == "acme"
    for route, body in ROUTES.items():
        wrong = await ask(route, json=body, headers=own | {"x-tenant": "globex"})
        assert wrong.status_code == 403
        assert wrong.json()["error"]["param"] == "x-tenant"
    stub = inference_pb2_grpc.InferenceServiceStub(guarded.channel)
    request = pb.GenerateRequest(
        prompt=pb.Prompt(text="Hello"), options=pb.GenerationOptions(tenant="globex")
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, metadata=(("authorization", keys[1]["alice"]),))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "tenant" in (caught.value.details() or "")


async def test_a_role_is_needed(guarded: Any, keys: Any) -> None:
    _, key = keys
    assert (await guarded.http.get("/health")).status_code == 200
    for route in ("/v1/models", "/openapi.json", "/nowhere"):
        assert (await guarded.http.get(route)).status_code == 401
        operators = await guarded.http.get(route, headers={"authorization": key["ops"]})
        assert operators.status_code == 403
        assert "role user" in operators.json()["error"]["message"]
        assert "www-authenticate" not in operators.headers
    twice = [("authorization", key["alice"]), ("authorization", key["bob"])]
    assert (await guarded.http.get("/v1/models", headers=twice)).status_code == 401
    stub = debug_pb2_grpc.DebugServiceStub(guarded.channel)
    for name, code in ((None, "UNAUTHENTICATED"), ("alice", "PERMISSION_DENIED"), ("ops", "OK")):
        metadata = () if name is None else (("authorization", key[name]),)
        call = stub.ListRequests(debug_pb2.ListRequestsRequest(), metadata=metadata)
        assert (await call.code()).name == code


async def test_a_key_that_was_taken_out_of_the_file_is_refused(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (first, line), (second, other) = (new_key(name, "t", [Role.USER]) for name in "ab")
    file = tmp_path / "keys"
    file.write_text(line.line())
    running = await start(identity=IdentityOptions(api_keys=file))

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return int((await running.http.get("/v1/models", headers=headers)).status_code)

    assert [await status(first), await status(second)] == [200, 401]
    file.write_text(f"\n{other.line()}")
    assert [await status(first), await status(second)] == [401, 200]


async def test_a_scoped_id_is_bounded_like_any_other(guarded: Any, keys: Any) -> None:
    headers = {"authorization": keys[1]["alice"], "x-request-id": "i" * 255}
    response = await guarded.http.post(
        "/v1/completions", json=ROUTES["/v1/completions"], headers=headers
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "request_id"


async def test_no_choice_of_a_salt_leads_to_another_tenants_prefixes() -> None:
    def salt(tenant: str, own: str) -> str:
        return Standing(tenant=tenant, is_own_tenant=True).scoped_salt(own)

    choices = [("a", ""), ("a", "b"), ("a", "/b"), ("ab", ""), ("b", "a")]
    assert len({salt(*choice) for choice in choices}) == len(choices)
    assert Standing(tenant="a").scoped_salt("red") == "red"


async def test_tls_on_both_ports_and_health_in_plaintext_on_a_third(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    made, port = make_certificates(tmp_path), free_port()
    identity = IdentityOptions(tls_cert=made.cert, tls_key=made.key, health_port=port)
    running = await start(wait=False, identity=identity)
    url = running.http_url.replace("http:", "https:")
    with pytest.raises(httpx.TransportError):
        await running.http.get("/health")
    with pytest.raises(grpc.aio.AioRpcError):
        await health(running.channel)
    context = ssl.create_default_context(cafile=made.ca)
    async with httpx.AsyncClient(base_url=url, verify=context, timeout=patience(10)) as http:
        assert (await http.get("/health")).status_code == 200
    credentials = grpc.ssl_channel_credentials(made.ca.read_bytes())
    async with grpc.aio.secure_channel(running.grpc_target, credentials) as channel:
        await health(channel)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as probes:
        await health(probes)
        answer = await health(probes, LIVENESS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = inference_pb2_grpc.InferenceServiceStub(probes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
