"""Leases of workers that register: who is there until when. Knows no clock: time comes in.

A step stream is a better sign of life than a lease. So the lease of an attached worker does not
end, and the time in which the scheduler itself stood still does not count.
"""

from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 0.5
_LONGEST_TICK_S = 2 * TICK_S


@dataclass(slots=True)
class _Lease:
    incarnation: int
    left_s: float


class Leases:
    """Leases by address."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, _Lease] = {}

    def renew(self, address: str, incarnation: int) -> None:
        """Begins a lease, or begins it anew."""
        self._leases[address] = _Lease(incarnation, self.lease_s)

    def end(self, address: str, incarnation: int) -> bool:
        """Ends a lease; False when there is none, or another process has it (0: any)."""
        lease = self._leases.get(address)
        if lease is None or incarnation not in (0, lease.incarnation):
            return False
        del self._leases[address]
        return True

    def tick(self, elapsed_s: float, is_attached: Callable[[str], bool]) -> list[str]:
        """Advances the time; returns the addresses whose leases have ended by that."""
        for address, lease in self._leases.items():
            if is_attached(address):
                lease.left_s = self.lease_s
            else:
                lease.left_s -= min(elapsed_s, _LONGEST_TICK_S)
        over = [address for address, lease in self._leases.items() if lease.left_s <= 0]
        for address in over:
            del self._leases[address]
        return over
