"""Options that several commands share, and the values they are converted to."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire._channel import (
    DEFAULT_SCHEDULER,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    Connection,
)
from pagewire._client import Client
from pagewire._connection.environment import API_KEY, TARGET
from pagewire._connection.peer_token import first_token, key_for
from pagewire._types import TLS, SamplingParams

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class CommandError(Exception):
    """Raised when a command cannot continue; the message is shown to the user."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that carry information."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)


def add_command(commands: "Subparsers", name: str, summary: str) -> argparse.ArgumentParser:
    """Adds a subcommand whose --help shows every default."""
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        formatter_class=_Help,
        allow_abbrev=False,
    )


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the address of the gateway, encryption and key."""
    group = parser.add_argument_group("connection")
    add = group.add_argument
    target = os.environ.get(TARGET) or DEFAULT_TARGET
    add("--target", default=target, metavar="HOST:PORT", help="gRPC port of the gateway")
    add("--api-key", metavar="KEY", help=f"key of the gateway (default: ${API_KEY})")
    add("--allow-insecure-key", action="store_true", help="send the key without TLS")
    add("--tls", action="store_true", help="encrypt, with gRPC's own root certificates")
    add("--ca-cert", metavar="PEM", help="encrypt, with this root certificate")
    add("--client-cert", metavar="PEM", help="client certificate, with --client-key")
    add("--client-key", metavar="PEM", help="key of --client-cert")
    add("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="time limit of one answer")


def to_connection(
    options: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Connection:
    """The connection from the options of add_connection."""
    files = (options.ca_cert, options.client_cert, options.client_key)
    return Connection(
        target=options.target,
        api_key=options.api_key or environ.get(API_KEY) or None,
        tls=TLS(*files) if options.tls or any(files) else None,
        timeout_s=options.timeout_s,
        allow_insecure_key=options.allow_insecure_key,
    )


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the address of the scheduler, and the token for it."""
    add = parser.add_argument
    add("--scheduler", default=DEFAULT_SCHEDULER, metavar="HOST:PORT", help="its address")
    add(
        "--peer-token-file",
        type=Path,
        metavar="FILE",
        help="the services' shared token (default: that of `pagewire up` on this machine, else the "
        "API key is sent)",
    )


def to_scheduler(options: argparse.Namespace) -> Connection:
    """The connection to the scheduler, from the options of add_connection and add_scheduler."""
    gateway, target = to_connection(options), options.scheduler
    if options.peer_token_file is not None:
        return replace(gateway, target=target, api_key=first_token(options.peer_token_file))
    is_private = gateway.tls is not None or gateway.allow_insecure_key
    key = key_for(target, gateway.api_key, is_private=is_private)
    return replace(gateway, target=target, api_key=key)


def to_client(options: argparse.Namespace) -> Client:
    """A client from the options of add_connection."""
    connection = to_connection(options)
    return Client(
        connection.target,
        api_key=connection.api_key,
        tls=connection.tls,
        timeout_s=connection.timeout_s,
        allow_insecure_key=connection.allow_insecure_key,
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the sampling options; those not given are the server's choice."""
    group = parser.add_argument_group("sampling (default: the server's choice)")

    def add(name: str, kind: type, text: str) -> None:
        metavar = kind.__name__.upper()
        # SUPPRESS: an option that is not given is absent from the namespace, and has no default to
        # show.
        group.add_argument(name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)

    add("--max-tokens", int, "most tokens to generate")
    add("--min-tokens", int, "fewest tokens to generate")
    add("--temperature", float, "0 is greedy")
    add("--top-p", float, "keep the likeliest tokens up to this probability")
    add("--top-k", int, "keep this many tokens")
    add("--min-p", float, "keep tokens with this share of the largest probability")
    add("--seed", int, "seed of the random choices")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=[], help="end here; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after end-of-sequence")


_SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


def to_sampling(options: argparse.Namespace) -> SamplingParams:
    """The parameters from the options of add_sampling."""
    given = {name: getattr(options, name) for name in _SAMPLING if name in options}
    return SamplingParams(**given, stop=options.stop, ignore_eos=options.ignore_eos or None)
