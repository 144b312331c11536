"""Connection settings from the arguments of a client, else from the environment.

PAGEWIRE_TARGET, PAGEWIRE_API_KEY, PAGEWIRE_CA_CERT (encrypts), PAGEWIRE_TIMEOUT_S and
PAGEWIRE_MAX_RETRIES; an empty variable is not set. An argument goes before its variable.
"""

import os
from collections.abc import Mapping

from pagewire._channel import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    Connection,
)
from pagewire._types import TLS

TARGET = "PAGEWIRE_TARGET"
API_KEY = "PAGEWIRE_API_KEY"
CA_CERT = "PAGEWIRE_CA_CERT"
TIMEOUT_S = "PAGEWIRE_TIMEOUT_S"
MAX_RETRIES = "PAGEWIRE_MAX_RETRIES"


def to_connection(
    target: str | None,
    api_key: str | None,
    tls: TLS | None,
    timeout_s: float | None,
    allow_insecure_key: bool,
    resume_timeout_s: float,
    max_retries: int | None,
    metadata: Mapping[str, str] | None,
    environ: Mapping[str, str] = os.environ,
) -> Connection:
    """The settings. Raises ValueError and InvalidArgument, naming the argument or variable."""
    if timeout_s is None:
        timeout_s = _number(environ, TIMEOUT_S, DEFAULT_TIMEOUT_S)
    if max_retries is None:
        max_retries = int(_number(environ, MAX_RETRIES, DEFAULT_MAX_RETRIES))
    return Connection(
        target=target or environ.get(TARGET) or DEFAULT_TARGET,
        api_key=api_key if api_key is not None else environ.get(API_KEY) or None,
        tls=tls or found_tls(environ),
        timeout_s=timeout_s,
        allow_insecure_key=allow_insecure_key,
        resume_timeout_s=resume_timeout_s,
        max_retries=max_retries,
        metadata=dict(metadata or {}),
    )


def found_tls(environ: Mapping[str, str] = os.environ) -> TLS | None:
    """The encryption that the environment asks for, if any."""
    ca_cert = environ.get(CA_CERT)
    return TLS(ca_cert) if ca_cert else None


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no number") from None
