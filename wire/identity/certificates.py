"""TLS of a server from PEM files, for gRPC and for HTTP; changed files serve the next handshake.

A connection keeps the certificate that it began with.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import grpc

from wire.identity.options import IdentityOptions
from wire.identity.watched import Watched


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files. With `client_ca` only clients with a certificate of that authority connect."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadedCertificates:
    """The content of the files, known to fit together."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class Certificates:
    """The certificates of one server."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises BadIdentityFile when the files do not fit together or cannot be read."""
        self._files = files
        paths = [files.cert, files.key, *([files.client_ca] if files.client_ca else [])]
        self._watched = Watched("--tls-cert", paths, partial(_load, files))

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that look at the files at every handshake."""
        given = self._watched.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """The new configuration; None while the last one holds. Called by gRPC's threads."""
            nonlocal given
            current = self._watched.current()
            if current is given:
                return None
            given = current
            return _grpc_configuration(current)

        fetch: Callable[[], grpc.ServerCertificateConfiguration] = changed  # type: ignore[assignment]  # None is allowed
        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(given), fetch, self._files.client_ca is not None
        )

    def ssl_context(self) -> ssl.SSLContext:
        """A context that hands every handshake to a context of the files as they are then."""
        outer = _load(self._files).context

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._watched.current().context

        # OpenSSL calls it for every client hello, with a server name or without.
        outer.sni_callback = choose
        return outer


def certificates_of(identity: IdentityOptions) -> Certificates | None:
    """The server's certificates; None for plaintext. Raises BadIdentityFile."""
    if identity.tls_cert is None or identity.tls_key is None:
        return None
    files = CertificateFiles(identity.tls_cert, identity.tls_key, identity.tls_client_ca)
    return Certificates(files)


def check_client_files(ca: Path, cert: Path | None, key: Path | None) -> None:
    """Raises OSError, or ValueError for files of a client that do not fit together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key, password=partial(_no_password, key))
    except ssl.SSLError as error:
        names = ", ".join(str(path) for path in (ca, cert, key) if path)
        raise ValueError(f"{names}: {error.reason or error}") from error


def _grpc_configuration(loaded: LoadedCertificates) -> grpc.ServerCertificateConfiguration:
    pairs = [(loaded.key, loaded.cert)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=loaded.client_ca)


def _load(files: CertificateFiles) -> LoadedCertificates:
    """Raises OSError, or ValueError when the files do not fit together."""
    before = _read(files)
    try:
        context = _context(files)
    except ssl.SSLError as error:
        raise ValueError(f"{_names(files)}: {error.reason or error}") from error
    if _read(files) != before:  # the context has read them a second time
        raise ValueError(f"{_names(files)}: changed while they were read")
    return LoadedCertificates(*before, context)


def _read(files: CertificateFiles) -> tuple[bytes, bytes, bytes | None]:
    client_ca = files.client_ca.read_bytes() if files.client_ca else None
    return files.cert.read_bytes(), files.key.read_bytes(), client_ca


def _context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    # Without tickets no session outlives a certificate or an authority that was withdrawn.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.load_cert_chain(files.cert, files.key, password=partial(_no_password, files.key))
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password(key: Path) -> NoReturn:
    raise ValueError(f"{key}: is encrypted; a service can read plain keys only")


def _names(files: CertificateFiles) -> str:
    return ", ".join(str(path) for path in (files.cert, files.key, files.client_ca) if path)
