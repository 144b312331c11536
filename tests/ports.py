"""Ports for services that are told theirs before they start."""

import random
import socket
import time

from tests.pace import patience

# Below those that the kernel gives to outgoing connections, which could take a port meanwhile.
FIRST, LAST = 10_000, 30_000
_random = random.SystemRandom()  # processes of one run must not draw the same
_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens, another one each time."""
    while not _is_free(port := _random.randrange(FIRST, LAST)):
        pass
    _given.add(port)
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return port not in _given


def await_closed(port: int) -> None:
    """Waits until nothing listens on a port: ranks end a moment after the worker that is killed.

    Not for long, since one that is stopped goes on listening.
    """
    deadline_s = time.monotonic() + patience(5.0)
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except ConnectionRefusedError:
            return
        except OSError:
            pass
        time.sleep(0.02)
