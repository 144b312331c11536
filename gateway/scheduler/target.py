"""The target of the gateway's channel: one scheduler, or the active one of several.

gRPC itself follows the active one: it keeps a connection to each address, watches the health of
each, and uses those that are SERVING under the name ACTIVE.
"""

import ipaddress
import json
from dataclasses import dataclass

from wire.health_port import ACTIVE

MAX_ADDRESS_CHARS = 300  # a name has at most 253
MAX_SCHEDULERS = 16
MAX_PORT = 65535
_LOOKUP_PAUSE_MS = 1_000  # between two lookups of a name; gRPC's default is 30 s
_FOLLOW_ACTIVE = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": ACTIVE},
    }
)


@dataclass(frozen=True, slots=True)
class SchedulerTarget:
    """A target of gRPC."""

    name: str
    has_several: bool = False  # one is active, the others stand by

    @property
    def options(self) -> list[tuple[str, int | str]]:
        """Options for the channel."""
        if not self.has_several:
            return []
        return [
            ("grpc.service_config", _FOLLOW_ACTIVE),
            ("grpc.dns_min_time_between_resolutions_ms", _LOOKUP_PAUSE_MS),
        ]


def scheduler_target(addresses: str, dns: str, *, uses_tls: bool) -> SchedulerTarget:
    """The target for `--scheduler` or `--scheduler-dns`, one of which is not empty.

    Raises ValueError, naming the option.
    """
    if bool(addresses) == bool(dns):
        raise ValueError("give one of --scheduler and --scheduler-dns")
    if dns:
        _check("--scheduler-dns", dns, "NAME:PORT")
        return SchedulerTarget(f"dns:///{dns}", has_several=True)
    several = addresses.split(",")
    for address in several:
        _check("--scheduler", address, "HOST:PORT")
    if len(several) == 1:
        return SchedulerTarget(addresses)
    if len(several) > MAX_SCHEDULERS or len(set(several)) < len(several):
        raise ValueError(f"--scheduler: name each once, and at most {MAX_SCHEDULERS}")
    if uses_tls:
        raise ValueError("--scheduler: with TLS several have one name: use --scheduler-dns")
    return SchedulerTarget(f"{_family(several)}:{addresses}", has_several=True)


def _check(option: str, address: str, form: str) -> None:
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT
    if not host or not is_port or len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
        raise ValueError(f"{option}: {address[:MAX_ADDRESS_CHARS]!r} is not {form}")


def _family(addresses: list[str]) -> str:
    """ipv4 or ipv6, whichever all have. Raises ValueError."""
    versions = set()
    for address in addresses:
        host = address.rpartition(":")[0]
        try:
            versions.add(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version)
        except ValueError:
            problem = f"{host!r} is no IP address: for several with one name use --scheduler-dns"
            raise ValueError(f"--scheduler: {problem}") from None
    if len(versions) > 1:
        raise ValueError("--scheduler: several must all be IPv4 or all IPv6")
    return f"ipv{versions.pop()}"
