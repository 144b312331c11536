"""The token that `pagewire up` makes for its services, and where other commands find it.

It lies in the user's cache, readable by the user alone, under the scheduler's port.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from pagewire._channel import is_local
from pagewire.settings.home import cache_root

TOKEN_BYTES = 32


def token_path(scheduler_port: int, environ: Mapping[str, str] = os.environ) -> Path:
    """The file with the token for a scheduler of this machine."""
    return cache_root(environ) / "peers" / f"{scheduler_port}.token"


def write_token(path: Path) -> None:
    """Writes a new random token. Raises OSError."""
    write_secret(path, secrets.token_urlsafe(TOKEN_BYTES))


def write_secret(path: Path, secret: str) -> None:
    """Writes a file that the user alone can read. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f"{secret}\n")
    fresh.replace(path)


def found_token(scheduler: str) -> str | None:
    """The token of a scheduler that `pagewire up` runs here; None when there is none."""
    port = scheduler.rpartition(":")[2]
    if not is_local(scheduler) or not port.isdecimal():
        return None
    try:
        return first_token(token_path(int(port)))
    except (OSError, IndexError):
        return None


def key_for(scheduler: str, own_key: str | None, *, is_private: bool) -> str | None:
    """The key to show a scheduler: the token of `pagewire up`, else one's own where it may travel.

    The key is the gateway's, and may be an operator's: it is left out rather than sent to another
    machine on a connection that is not private.
    """
    token = found_token(scheduler)
    if token is None and (is_private or is_local(scheduler)):
        return own_key
    return token


def first_token(path: Path) -> str:
    """The token of a file that is sent. Raises OSError, or IndexError for an empty file."""
    return path.read_text(encoding="ascii").split()[0]
