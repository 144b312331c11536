"""What the services of `pagewire up` show each other, and what this command shows them.

They always share a random token. --tls adds test certificates, --api-keys the keys of clients.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pagewire._types import TLS
from pagewire.cli.launcher.certificates import make_certificates
from pagewire.cli.launcher.services import Settings
from pagewire.cli.options import API_KEY_VARIABLE, CommandError
from pagewire.cli.peer_token import token_path, write_token


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The settings with the services' identity options, and what clients here need."""

    settings: Settings
    ca: Path | None  # None: plaintext
    api_key: str | None
    needs_key: bool  # of clients

    @property
    def tls(self) -> TLS | None:
        """How to reach each of the services."""
        return None if self.ca is None else TLS(self.ca)

    @property
    def can_ask(self) -> bool:
        """Whether this command may ask the sample question."""
        return self.api_key is not None or not self.needs_key


def check_options(settings: Settings, options: argparse.Namespace) -> None:
    """Refuses by name what would keep this command from its own services."""
    for service in ("worker", "scheduler", "gateway"):
        for word in getattr(settings, f"{service}_options"):
            if word.startswith("--tls-"):
                name = word.partition("=")[0]
                raise CommandError(
                    f"--{service}-options: {name} is for services that are started one by one; "
                    "here --tls makes certificates for all"
                )
    key, needs_key = _key_and_need(settings, options, os.environ)
    if options.once and needs_key and key is None:
        raise CommandError(
            f"--once: the sample question needs one of the API keys, in ${API_KEY_VARIABLE}"
        )


@contextmanager
def local_identity(
    settings: Settings, options: argparse.Namespace, folder: Path
) -> Iterator[LocalIdentity]:
    """Makes the token and, with --tls, certificates in `folder`; removes the token at the end."""
    token = _new_token(settings.scheduler_port, folder)
    api_keys = None if options.api_keys is None else options.api_keys.resolve()
    ca, own, peer = None, _words(("--api-keys", api_keys)), _words(("--peer-token-file", token))
    served = calls = _words()
    if options.tls:
        made = make_certificates(folder / "tls", (settings.reachable_host,))
        ca = made.ca
        served = _words(("--tls-cert", made.cert), ("--tls-key", made.key))
        calls = _words(("--tls-ca", made.ca))
    secured = replace(
        settings,
        worker_options=(*own, *peer, *served, *settings.worker_options),
        scheduler_options=(*own, *peer, *served, *calls, *settings.scheduler_options),
        gateway_options=(*own, *peer, *served, *calls, *settings.gateway_options),
    )
    api_key, needs_key = _key_and_need(settings, options, os.environ)
    try:
        yield LocalIdentity(secured, ca, api_key, needs_key)
    finally:
        token.unlink(missing_ok=True)


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


def _key_and_need(
    settings: Settings, options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[str | None, bool]:
    """The key of this command, and whether the gateway requires one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--api-key")
    parser.add_argument("--api-keys", default=options.api_keys)
    try:
        given, _ = parser.parse_known_args(settings.gateway_options)
    except argparse.ArgumentError:
        return None, True  # the gateway will say what is wrong
    key = given.api_key or environ.get(API_KEY_VARIABLE) or None
    return key, key is not None or given.api_keys is not None
