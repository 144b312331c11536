"""Connection settings: address, encryption, key, deadline, keepalive, retries. Opens channels."""

import asyncio
import ipaddress
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TypedDict

import grpc
import grpc.aio

from pagewire._errors import DeadlineExceeded, InvalidArgument, PagewireError, Unavailable
from pagewire._types import TLS, Model

DEFAULT_TARGET = "localhost:50051"
DEFAULT_SCHEDULER = "localhost:50052"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESUME_TIMEOUT_S = 30.0
DEFAULT_MAX_RETRIES = 5

_METADATA_KEY = re.compile(r"(?!grpc-)[a-z0-9_.-]+")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")

_SERVICE = "pagewire.v1.InferenceService"

# Only calls without side effects are retried. A generation is not sent twice, since it may have
# run; a broken stream is resumed after its last token instead (`_attempts`).
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [
                {"service": _SERVICE, "method": method}
                for method in ("ListModels", "Tokenize", "Detokenize")
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


class Terms(TypedDict):
    """Deadline and metadata of a gRPC call."""

    timeout: float | None
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings for opening a channel and starting calls on it."""

    target: str = DEFAULT_TARGET
    api_key: str | None = field(default=None, repr=False)
    tls: TLS | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    allow_insecure_key: bool = False
    resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S
    max_retries: int = DEFAULT_MAX_RETRIES
    metadata: Mapping[str, str] = field(default_factory=dict)  # of every call

    def __post_init__(self) -> None:
        check_target(self.target)
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not positive")
        if not self.resume_timeout_s >= 0:
            raise ValueError(f"resume_timeout_s: {self.resume_timeout_s} is negative")
        if self.max_retries < 0:
            raise ValueError(f"max_retries: {self.max_retries} is negative")
        tuple(_checked(self.metadata))
        exposed = self.api_key is not None and self.tls is None and not is_local(self.target)
        if exposed and not self.allow_insecure_key:
            raise ValueError(
                f"api_key: would travel unencrypted to {self.target}; "
                "use tls, or allow_insecure_key=True on a network you trust"
            )

    def terms(self, timeout_s: float | None, metadata: Mapping[str, str] | None = None) -> Terms:
        """Deadline and metadata of a call. Raises InvalidArgument."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return Terms(
            timeout=None if math.isinf(seconds) else seconds,
            metadata=tuple(_checked({**self.metadata, **(metadata or {})}))
            + (() if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)),
        )


def _checked(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The pairs as gRPC sends them. Raises InvalidArgument; no value is in the message."""
    for name, value in metadata.items():
        key = name.lower()
        if not _METADATA_KEY.fullmatch(key) or key.endswith("-bin"):
            raise InvalidArgument(f"metadata: {name!r} is no name that a call can carry")
        if key == "authorization":
            raise InvalidArgument("metadata: authorization is set by api_key")
        if not isinstance(value, str) or not _METADATA_VALUE.fullmatch(value):
            raise InvalidArgument(f"metadata: the value of {name} is not printable ASCII")
        yield key, value


def check_target(target: str) -> None:
    """Raises ValueError for a URL: waiting for an answer there would end in a timeout."""
    scheme, is_url, rest = target.partition("://")
    if is_url and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        host = rest.partition("/")[0].partition(":")[0] or "localhost"
        raise ValueError(
            f"target: {target} is a URL; give HOST:PORT of the gRPC API, which by default is "
            f"{host}:{DEFAULT_TARGET.rpartition(':')[2]}"
        )


def is_local(target: str) -> bool:
    """True if a gRPC target is on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.rpartition("/")[2]  # dns:///host:port
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    if address.startswith("["):
        host = address[1:].partition("]")[0]
    else:
        host = address.rpartition(":")[0] if address.count(":") == 1 else address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_channel(connection: Connection) -> grpc.Channel:
    """A blocking channel; it connects on the first call."""
    if connection.tls is None:
        return grpc.insecure_channel(connection.target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(
        connection.target, _credentials(connection.tls), options=CHANNEL_OPTIONS
    )


class AioOpener:
    """An asyncio channel of the event loop in which it is first asked for, and its end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opened: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel; it connects on the first call."""
        if self._opened is None:
            target, tls = self._connection.target, self._connection.tls
            if tls is None:
                self._opened = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            else:
                self._opened = grpc.aio.secure_channel(
                    target, _credentials(tls), options=CHANNEL_OPTIONS
                )
        return self._opened

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        if self._opened is not None:
            await self._opened.close()


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca_cert),
        private_key=_read(tls.client_key),
        certificate_chain=_read(tls.client_cert),
    )


def _read(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


class ReadyWait:
    """The retry rule of wait_until_ready: which failures to retry, and for how long."""

    POLL_S = 0.2
    ATTEMPT_S = 2.0  # the first; each that the server does not answer in time doubles the next

    def __init__(self, target: str, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._attempt_s = self.ATTEMPT_S
        self._reason = "it does not answer"
        self.models: tuple[Model, ...] = ()

    def attempt_s(self) -> float:
        """Timeout of the next attempt, in seconds. Raises DeadlineExceeded when the time is up."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(
                f"{self._target} is not ready after {self._timeout_s:g} s: {self._reason}",
                code="DEADLINE_EXCEEDED",
            )
        return min(self._attempt_s, remaining)

    def sit_out(self, error: PagewireError) -> None:
        """Keeps the error as the reason for waiting; raises an error that waiting cannot cure."""
        if isinstance(error, Unavailable):
            self._reason = str(error)
        elif isinstance(error, DeadlineExceeded):  # it would say no more than "no answer"
            self._attempt_s *= 2
        else:
            raise error

    def note(self, models: tuple[Model, ...]) -> None:
        """Keeps as the reason for waiting that the server lists no models yet."""
        self.models = models
        self._reason = "it lists no model yet"

    def pause(self) -> None:
        """Waits until the next attempt."""
        time.sleep(self.POLL_S)

    async def aio_pause(self) -> None:
        """Waits until the next attempt."""
        await asyncio.sleep(self.POLL_S)
