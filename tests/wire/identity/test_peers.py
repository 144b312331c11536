"""Calls between services: token and certificates, also after the files have changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.cli.launcher.certificates import MadeCertificates
from tests.pace import patience
from tests.wire.identity.conftest import copy
from wire.identity.access import CALLER
from wire.identity.certificates import certificates_of
from wire.identity.interceptors import AioAccessInterceptor
from wire.identity.options import IdentityOptions
from wire.identity.peers import peer_opener
from wire.identity.watched import BadIdentityFile
from wire.server import bind

SERVICE = "pagewire.v1.WorkerService"


async def describe(_: bytes, context: Any) -> bytes:
    caller = CALLER.get()
    return b"" if caller is None else caller.name.encode()


async def attach(requests: Any, context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def worker(identity: IdentityOptions) -> AsyncIterator[str]:
    """A worker with two methods; yields its address."""
    access, certificates = identity.peer_access(), certificates_of(identity)
    server = grpc.aio.server(interceptors=[AioAccessInterceptor(access)] if access else [])
    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Attach": grpc.stream_stream_rpc_method_handler(attach),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    credentials = certificates.grpc_credentials() if certificates else None
    port = bind(server, "127.0.0.1:0", "test", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def outcome(channel: grpc.aio.Channel) -> str:
    """The worker's word about the caller, or the code of its refusal."""
    call = channel.unary_unary(f"/{SERVICE}/Describe")
    try:
        answer: bytes = await call(b"", timeout=patience(5))
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return answer.decode()


def token_file(folder: Path, *tokens: str) -> Path:
    path = folder / f"tokens-{len(list(folder.iterdir()))}"
    path.write_text("\n".join(tokens))
    return path


async def test_a_token_is_asked_for_and_can_be_replaced_while_both_run(tmp_path: Path) -> None:
    old, new = "old-" * 8, "new-" * 8
    mine, theirs, none = (token_file(tmp_path, old) for _ in range(3))
    none.write_text("none-" * 8)
    opener = peer_opener(IdentityOptions(peer_token_file=mine))
    async with (
        worker(IdentityOptions(peer_token_file=theirs)) as address,
        opener(address, []) as channel,
        peer_opener(IdentityOptions())(address, []) as bare,
        peer_opener(IdentityOptions(peer_token_file=none))(address, []) as wrong,
    ):
        assert await outcome(channel) == "a service"
        assert await outcome(bare) == await outcome(wrong) == "UNAUTHENTICATED"
        theirs.write_text(f"{old}\n{new}\n")  # first all accept both,
        assert await outcome(channel) == "a service"
        mine.write_text(f"{new}\n{old}\n")  # then all send the new one,
        assert await outcome(channel) == "a service"
        theirs.write_text(new)  # then the old one goes
        assert await outcome(channel) == "a service"


async def test_a_stream_is_refused_before_its_first_message(tmp_path: Path) -> None:
    theirs = IdentityOptions(peer_token_file=token_file(tmp_path, "token-" * 4))
    async with worker(theirs) as address, grpc.aio.insecure_channel(address) as bare:
        stream: Any = bare.stream_stream(f"/{SERVICE}/Attach")(timeout=patience(5))
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_new_certificate_is_shown_on_the_next_call_and_streams_go_on(
    authorities: dict[str, MadeCertificates], served: MadeCertificates
) -> None:
    first, second = authorities["first"], authorities["second"]
    served.ca.write_bytes(first.ca.read_bytes())
    client_ca = served.ca.with_name("client-ca.pem")
    client_ca.write_bytes(first.ca.read_bytes())
    theirs = IdentityOptions(tls_cert=first.cert, tls_key=first.key, tls_client_ca=client_ca)
    mine = IdentityOptions(tls_ca=served.ca, tls_client_cert=served.cert, tls_client_key=served.key)
    async with worker(theirs) as address, peer_opener(mine)(address, []) as channel:
        assert await outcome(channel) == "a service"
        stream: Any = channel.stream_stream(f"/{SERVICE}/Attach")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        served.cert.write_text("half")
        assert await outcome(channel) == "a service"  # by the last good one
        client_ca.write_bytes(second.ca.read_bytes())
        copy(second, served)
        assert await outcome(channel) == "a service"  # by the new certificate
        await stream.write(b"after")
        assert await asyncio.wait_for(stream.read(), patience(5)) == b"after"
        served.ca.write_bytes(second.ca.read_bytes())
        assert await outcome(channel) == "UNAVAILABLE"  # the server's is not of this authority


def test_client_files_that_cannot_be_used_at_the_start_are_named(
    authorities: dict[str, MadeCertificates], tmp_path: Path
) -> None:
    first, second = authorities["first"], authorities["second"]
    (nonsense := tmp_path / "nonsense.pem").write_text("nonsense")
    for options in (
        IdentityOptions(tls_ca=nonsense),
        IdentityOptions(tls_ca=tmp_path / "none.pem"),
        IdentityOptions(tls_ca=first.ca, tls_client_cert=first.cert, tls_client_key=second.key),
    ):
        with pytest.raises(BadIdentityFile, match="--tls-ca"):
            peer_opener(options)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    for tokens in (["short"], [], ["long enough for it", "short"]):
        options = IdentityOptions(peer_token_file=token_file(tmp_path, *tokens))
        with pytest.raises(BadIdentityFile, match="--peer-token-file"):
            options.peer_access()
        with pytest.raises(BadIdentityFile, match="--peer-token-file"):
            peer_opener(options)
