"""The kill switch of `pagewire up --demo`: the page kills the worker, to show the recovery.

The gateway only writes a byte into a pipe in a folder of the user who started the demo; the
supervisor at its other end kills and starts the worker again.
"""

import ipaddress
import os
import stat
from pathlib import Path

from gateway.errors.request_errors import ErrorKind, RequestError, unavailable

KILL_WORKER = b"w"


class DemoSwitch:
    """The gateway's end of the pipe."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe

    def kill_worker(self) -> None:
        """Asks the supervisor to kill the worker. Raises RequestError if none listens."""
        try:
            end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise unavailable("the supervisor of the demo does not listen") from error
        try:
            os.write(end, KILL_WORKER)
        finally:
            os.close(end)


def problem_with_pipe(pipe: Path) -> str:
    """Why this is no pipe of a demo; empty if it is one."""
    try:
        mode = pipe.lstat().st_mode
    except OSError as error:
        return f"{pipe}: {error.strerror}"
    if not stat.S_ISFIFO(mode) or mode & 0o077:
        return f"{pipe} is no pipe of this user alone; `pagewire up --demo` makes one"
    return ""


def check_is_local(client: str, host: str | None, origin: str | None) -> None:
    """Raises RequestError unless a call comes from this machine and from no other site's page.

    A page of another site may send a browser here: under the name of that site, which the header
    `host` shows, or with an `origin` that is not this server.
    """
    name = (host or "").rpartition(":")[0] if _has_port(host or "") else host or ""
    is_local = _is_loopback(client) and (name == "localhost" or _is_loopback(name.strip("[]")))
    if not is_local or (origin is not None and origin.partition("://")[2] != host):
        problem = "the kill switch is for pages of this server, opened on its own machine"
        raise RequestError(ErrorKind.FORBIDDEN, problem)


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdecimal() and not host.endswith("]")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
