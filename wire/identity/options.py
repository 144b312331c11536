"""The identity options of every service, and what is built from them."""

import argparse
import ipaddress
import logging
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from wire.identity.access import Access, watched_tokens
from wire.identity.keys import KeyRing, read_keys
from wire.identity.watched import Watched

MAX_PORT = 65535

log = logging.getLogger("wire.identity")


@dataclass(frozen=True, slots=True)
class IdentityOptions:
    """TLS, keys and tokens of one service. Raises ValueError for options that do not fit."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_ca: Path | None = None
    tls_client_cert: Path | None = None
    tls_client_key: Path | None = None
    api_keys: Path | None = None
    peer_token_file: Path | None = None
    health_port: int | None = None
    metrics_port: int | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert")
        for name, port in (("health", self.health_port), ("metrics", self.metrics_port)):
            if port is not None and not 0 <= port <= MAX_PORT:
                raise ValueError(f"--{name}-port: {port} is not a port")
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("--tls-client-cert and --tls-client-key belong together")
        if self.tls_client_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-client-cert needs --tls-ca")

    def check_host(self, host: str) -> None:
        """For a service that serves peers. Raises ValueError for a host it must not listen on."""
        knows_peers = self.tls_client_ca is not None or self.peer_token_file is not None
        if self.api_keys is not None and not knows_peers:
            raise ValueError("--api-keys needs --tls-client-ca or --peer-token-file, for peers")
        if not (knows_peers or self.insecure or is_loopback(host)):
            raise ValueError(
                f"--host: {host} can be reached from other machines, and any caller could take "
                "this service over; give --tls-client-ca or --peer-token-file, or say --insecure"
            )
        if self.peer_token_file is not None and self.tls_cert is None and not is_loopback(host):
            log.warning("without --tls-cert the peer token is sent in plaintext to %s", host)

    def public_access(self, api_key: str | None) -> Access | None:
        """For the gateway: what clients must show; None for nothing. Raises BadIdentityFile."""
        if self.api_keys is not None:
            return Access(keys=self._watched_keys(self.api_keys).current)
        if api_key is None:
            return None
        ring = KeyRing.of_single(api_key)
        return Access(keys=lambda: ring)

    def peer_access(self) -> Access | None:
        """For scheduler and worker: what callers must show. Raises BadIdentityFile."""
        if self.peer_token_file is None and self.tls_client_ca is None:
            return None
        keys = None if self.api_keys is None else self._watched_keys(self.api_keys).current
        token = self.peer_token_file
        tokens = None if token is None else watched_tokens(token).current
        return Access(keys, tokens, by_certificate=self.tls_client_ca is not None)

    @staticmethod
    def _watched_keys(path: Path) -> Watched[KeyRing]:
        return Watched("--api-keys", [path], partial(read_keys, path))


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("unix")


def take_identity(options: dict[str, Any]) -> IdentityOptions:
    """Removes the identity options from `options`; returns them as one value. Raises ValueError."""
    names = [field.name for field in fields(IdentityOptions)]
    return IdentityOptions(**{name: options.pop(name) for name in names if name in options})


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options of every service."""
    add = parser.add_argument
    add("--tls-cert", type=Path, metavar="PEM", help="serve TLS with this certificate chain")
    add("--tls-key", type=Path, metavar="PEM", help="its private key")
    add("--tls-client-ca", type=Path, metavar="PEM", help="clients need a certificate of this CA")
    add("--api-keys", type=Path, metavar="FILE", help="hashed API keys, from `pagewire keys new`")
    add("--health-port", type=int, metavar="PORT", help="plaintext port with gRPC health alone")
    add("--metrics-port", type=int, metavar="PORT", help="plaintext port with GET /metrics alone")


def add_peer_options(parser: argparse.ArgumentParser, *, serves: bool, calls: bool) -> None:
    """Options of a service that serves other services, calls them, or both."""
    add = parser.add_argument
    text = "shared secret of the services, one a line: the first is sent, each is accepted"
    add("--peer-token-file", type=Path, metavar="FILE", help=text)
    if serves:
        text = "listen beyond this machine although any caller is accepted"
        add("--insecure", action="store_true", help=text)
    if calls:
        add("--tls-ca", type=Path, metavar="PEM", help="call the next service by TLS, with this CA")
        add("--tls-client-cert", type=Path, metavar="PEM", help="certificate to show to it")
        add("--tls-client-key", type=Path, metavar="PEM", help="key of --tls-client-cert")
