"""Ports for services that are told theirs before they start."""

import os
import random
import socket

# Below those that the kernel gives to outgoing connections, which could take a port meanwhile.
FIRST, LAST = 10_000, 32_000
# Ranks of a worker listen on the ports that follow its own: these are never given.
RANKS = 4
# Processes of one run draw from ports of their own: what one has drawn may not listen yet.
PROCESSES = 8
_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens, another one each time."""
    ports = _own_ports()
    if 2 * len(_given) > len(ports):
        _given.clear()  # long ago
    while not _is_free(port := _random.choice(ports)):
        pass
    _given.add(port)
    return port


def _own_ports() -> range:
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not name:
        return range(FIRST, LAST, RANKS)
    each = (LAST - FIRST) // PROCESSES
    first = FIRST + int(name.removeprefix("gw")) % PROCESSES * each // RANKS * RANKS
    return range(first, first + each - RANKS, RANKS)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return port not in _given
