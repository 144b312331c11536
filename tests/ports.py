"""Ports for services that are told theirs before they start."""

import random
import socket

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
