"""Identities in `pagewire up`: what its services show each other, and what this command shows them.

They always share a random token. --tls adds test certificates, --api-keys the keys of clients.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pagewire._connection.environment import API_KEY
from pagewire._connection.peer_token import first_token, token_path, write_secret, write_token
from pagewire._types import TLS
from pagewire.cli.launcher.certificates import make_certificates
from pagewire.cli.launcher.options.up_options import SERVICES
from pagewire.cli.launcher.services import Settings
from pagewire.cli.options import CommandError
from pagewire.settings import environment, sources

GATEWAY_KEY_VARIABLE = environment.variable("api-key", "gateway")


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The settings with the services' identity options, and what clients here need."""

    settings: Settings
    ca: Path | None  # None: plaintext
    api_key: str | None
    needs_key: bool  # of clients
    key_file: Path | None = None  # holds api_key, where the user's shell does not
    peer_token: str = ""

    @property
    def tls(self) -> TLS | None:
        """The encryption of calls to each of the services; None: there is none."""
        return None if self.ca is None else TLS(self.ca)

    @property
    def can_ask(self) -> bool:
        """True if this command may ask the sample question."""
        return self.api_key is not None or not self.needs_key


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The gateway's demands on clients, and the key of this command."""

    own: str | None
    is_needed: bool
    for_gateway: str | None = None  # a key that only this command knows of


def check_options(settings: Settings, options: argparse.Namespace) -> None:
    """Refuses by name what would keep this command from its own services."""
    for service in SERVICES:
        for word in getattr(settings, f"{service}_options"):
            if word.startswith("--tls-"):
                name = word.partition("=")[0]
                raise CommandError(
                    f"--{service}-options: {name} is for services that are started one by one; "
                    "here --tls makes certificates for all"
                )
    keys = client_keys(settings, options, os.environ)
    if options.once and keys.is_needed and keys.own is None:
        raise CommandError(f"--once: the sample question needs one of the API keys, in ${API_KEY}")


@contextmanager
def local_identity(
    settings: Settings, options: argparse.Namespace, folder: Path
) -> Iterator[LocalIdentity]:
    """Makes the token and, with --tls, certificates in `folder`; removes the secrets at the end."""
    token = _new_token(settings.scheduler_port, folder)
    key_file = token.with_suffix(".key")
    api_keys = None if options.api_keys is None else options.api_keys.resolve()
    ca, own, peer = None, _words(("--api-keys", api_keys)), _words(("--peer-token-file", token))
    served = calls = _words()
    if options.tls:
        made = make_certificates(folder / "tls", (settings.reachable_host,))
        ca = made.ca
        served = _words(("--tls-cert", made.cert), ("--tls-key", made.key))
        calls = _words(("--tls-ca", made.ca))
    keys = client_keys(settings, options, os.environ)
    secured = replace(
        settings,
        worker_options=(*own, *peer, *served, *settings.worker_options),
        scheduler_options=(*own, *peer, *served, *calls, *settings.scheduler_options),
        gateway_options=(*own, *peer, *served, *calls, *settings.gateway_options),
        # Not among the words, which every user of this machine can read.
        gateway_environ=()
        if keys.for_gateway is None
        else ((GATEWAY_KEY_VARIABLE, keys.for_gateway),),
    )
    is_hidden = keys.is_needed and keys.own not in (None, os.environ.get(API_KEY))
    try:
        if keys.own is not None and is_hidden:
            write_secret(key_file, keys.own)
        yield LocalIdentity(
            secured,
            ca,
            keys.own,
            keys.is_needed,
            key_file if is_hidden else None,
            first_token(token),
        )
    finally:
        token.unlink(missing_ok=True)
        key_file.unlink(missing_ok=True)


def _words(*options: tuple[str, Path | None]) -> tuple[str, ...]:
    return tuple(word for name, path in options if path is not None for word in (name, str(path)))


def _new_token(scheduler_port: int, folder: Path) -> Path:
    """The file with a new token: where other commands find it, else in `folder`."""
    path = token_path(scheduler_port)
    try:
        write_token(path)
    except OSError:
        path = folder / "peer.token"
        write_token(path)
    return path


def client_keys(
    settings: Settings, options: argparse.Namespace, environ: Mapping[str, str]
) -> ClientKeys:
    """As the gateway will read its options, from all their sources. Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    sources.add_config(parser)
    parser.add_argument("--api-key")
    parser.add_argument("--api-keys", type=Path)
    # What the gateway does not find in its own environment must come from here.
    of_gateway = environment.found("api-key", "gateway", environ)
    is_own = options.api_key is not None and options.api_key != (of_gateway or ("", ""))[1]
    own = [f"--api-key={options.api_key}"] if is_own else []
    own += [] if options.api_keys is None else [f"--api-keys={options.api_keys}"]
    typed = [*own, *settings.gateway_options]
    try:
        added = sources.words(parser, typed, "gateway", environ, checks_keys=False)
        given, _ = parser.parse_known_args([*added, *typed])
    except argparse.ArgumentError:
        return ClientKeys(None, is_needed=True)  # the gateway will say what is wrong
    if is_own and given.api_keys is not None:
        raise ValueError("--api-key and --api-keys exclude each other")
    key = given.api_key or environ.get(API_KEY) or None
    is_needed = given.api_key is not None or given.api_keys is not None
    return ClientKeys(key, is_needed, options.api_key if is_own else None)
