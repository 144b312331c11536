"""The cluster's network: a bridge on this machine, and for each pod a namespace of its own.

Pods have addresses on the bridge and may all use the same ports. A service's address is one of this
machine's, on the bridge, with a relay to the pods that are ready.
"""

import itertools
import os
import random
import subprocess
import threading

_random = random.SystemRandom()  # processes of one run must not draw the same


def why_not() -> str:
    """The parts that this machine lacks; empty if none."""
    if os.geteuid() != 0:
        return "no root: pods cannot have roots and networks of their own"
    name = f"pwt{os.getpid()}"
    for line in (f"link add {name} type veth peer name {name}p", f"link del {name}"):
        ran = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
        if ran.returncode:
            return f"no virtual networks: ip {line}: {ran.stderr.strip()}"
    return ""


class Network:
    """Addresses, the bridge, and the pods' ends of it."""

    def __init__(self) -> None:
        self._prefix = f"10.{_random.randrange(128, 250)}"
        self._bridge = _interface()
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()
        # An address of its own: else it takes the lowest of its pods', which changes as pods come
        # and go, and what is sent to the one before is lost until neighbours ask again.
        _ip(f"link add {self._bridge} address {_hardware_address()} type bridge")
        _ip(f"addr add {self._prefix}.0.1/16 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")

    @property
    def resolver(self) -> str:
        """The address of the cluster's DNS."""
        return f"{self._prefix}.0.1"

    def pod_address(self) -> str:
        """An address that no other pod has had."""
        high, low = divmod(next(self._numbers), 250)
        return f"{self._prefix}.{high + 1}.{low + 1}"

    def service_address(self) -> str:
        """An address of this machine, for a service."""
        with self._lock:
            high, low = divmod(next(self._numbers), 250)
            address = f"{self._prefix}.{high + 200}.{low + 1}"
            _ip(f"addr add {address}/16 dev {self._bridge}")
        return address

    def connect(self, pid: int, address: str) -> None:
        """Gives the namespace of a process an interface with this address."""
        with self._lock:
            outer = _interface()
            _ip(f"link add {outer} type veth peer name eth0 netns {pid}")
            _ip(f"link set {outer} master {self._bridge} up")
        for line in (
            f"addr add {address}/16 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {self._prefix}.0.1",
        ):
            _run("nsenter", "--target", str(pid), "--net", "ip", *line.split())

    def close(self) -> None:
        """Removes the bridge; the pods' ends go with their namespaces."""
        _ip(f"link del {self._bridge}")


def _interface() -> str:
    """A name that no other interface has, nor one that is about to go: 15 characters at most."""
    return f"pw{_random.randrange(16**12):012x}"


def _hardware_address() -> str:
    """One for a single interface, given by no maker."""
    return ":".join(f"{byte:02x}" for byte in (0x02, *_random.randbytes(5)))


def _ip(line: str) -> None:
    _run("ip", *line.split())


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
