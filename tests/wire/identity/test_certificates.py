"""TLS of gRPC servers (asyncio, threaded) and of HTTP; files that change; client certificates."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.cli.launcher.certificates import MadeCertificates
from tests.pace import patience
from tests.wire.identity.conftest import copy
from wire.identity.certificates import CertificateFiles, Certificates
from wire.identity.watched import BadIdentityFile
from wire.server import bind

Authorities = dict[str, MadeCertificates]
KINDS = ("aio", "threaded", "http")


@asynccontextmanager
async def serving(kind: str, certificates: Certificates) -> AsyncIterator[int]:
    """A server that does nothing; yields its port."""
    if kind == "http":
        listener = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=certificates.ssl_context())
        async with listener:
            yield listener.sockets[0].getsockname()[1]
        return
    server: Any = grpc.aio.server() if kind == "aio" else grpc.server(ThreadPoolExecutor(1))
    port = bind(server, "127.0.0.1:0", "test", certificates.grpc_credentials())
    if kind == "aio":
        await server.start()
        yield port
        await server.stop(None)
        return
    server.start()
    yield port
    await asyncio.to_thread(server.stop(None).wait)


def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x")
    writer.close()


async def handshake(
    port: int, trusted: MadeCertificates, shown: MadeCertificates | None = None
) -> bytes:
    """The certificate that the server shows; raises ssl.SSLError or ConnectionError."""

    def connect() -> bytes:
        context = ssl.create_default_context(cafile=trusted.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        with (
            socket.create_connection(("127.0.0.1", port), patience(10)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            found = connection.getpeercert(binary_form=True)
            connection.settimeout(patience(10))
            # In TLS 1.3 the refusal of a client comes after its handshake: an alert or the end.
            if not connection.recv(1):
                raise ConnectionError("the server closed the connection")
            assert found is not None
            return found

    return await asyncio.to_thread(connect)


def shown_by(made: MadeCertificates) -> bytes:
    return ssl.PEM_cert_to_DER_cert(made.cert.read_text())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_certificate_swapped_on_disk_is_served_by_the_same_server(
    kind: str, authorities: Authorities, served: MadeCertificates
) -> None:
    first, second = authorities["first"], authorities["second"]
    async with serving(kind, Certificates(CertificateFiles(served.cert, served.key))) as port:
        assert await handshake(port, first) == shown_by(first)
        copy(second, served)
        assert await handshake(port, second) == shown_by(second)
        with pytest.raises(ssl.SSLCertVerificationError):
            await handshake(port, first)


@pytest.mark.parametrize("kind", KINDS)
async def test_files_that_do_not_fit_leave_the_last_ones_in_force(
    kind: str, authorities: Authorities, served: MadeCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authorities["first"], authorities["second"]
    async with serving(kind, Certificates(CertificateFiles(served.cert, served.key))) as port:
        served.cert.write_bytes(second.cert.read_bytes())  # its key has not come yet
        assert await handshake(port, first) == shown_by(first)
        served.cert.write_text("half")
        assert await handshake(port, first) == shown_by(first)
        served.cert.unlink()
        assert await handshake(port, first) == shown_by(first)
        copy(second, served)
        assert await handshake(port, second) == shown_by(second)
    assert caplog.text.count("is not used") >= 3


@pytest.mark.parametrize("kind", KINDS)
async def test_with_a_client_ca_only_its_certificates_connect_also_after_it_changed(
    kind: str, authorities: Authorities, served: MadeCertificates
) -> None:
    first, second = authorities["first"], authorities["second"]
    served.ca.write_bytes(first.ca.read_bytes())
    certificates = Certificates(CertificateFiles(served.cert, served.key, served.ca))
    async with serving(kind, certificates) as port:
        for allowed, refused in ((first, second), (second, first)):
            served.ca.write_bytes(allowed.ca.read_bytes())
            await handshake(port, first, allowed)
            for shown in (None, refused):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await handshake(port, first, shown)


@pytest.mark.parametrize("kind", KINDS)
async def test_plaintext_gets_no_answer(kind: str, served: MadeCertificates) -> None:
    async with serving(kind, Certificates(CertificateFiles(served.cert, served.key))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), patience(10))
            assert b"HTTP" not in answer
        writer.close()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda files: files.key.unlink(), "key.pem"),
        (lambda files: files.cert.write_text("nonsense"), "cert.pem"),
        (lambda files: files.ca.write_text("nonsense"), "ca.pem"),
        (lambda files: encrypt(files.key), "is encrypted"),
    ],
)
def test_files_that_cannot_be_used_at_the_start_are_named(
    spoil: Callable[[MadeCertificates], None],
    problem: str,
    authorities: Authorities,
    served: MadeCertificates,
) -> None:
    served.ca.write_bytes(authorities["first"].ca.read_bytes())
    spoil(served)
    with pytest.raises(BadIdentityFile, match=problem) as caught:
        Certificates(CertificateFiles(served.cert, served.key, served.ca))
    assert "--tls-cert" in str(caught.value)


def encrypt(key: Path) -> None:
    words = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", key]
    subprocess.run(words, check=True, capture_output=True, timeout=patience(10))
