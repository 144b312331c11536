"""Fair share: a virtual token counter per tenant that measures the service received.

A tenant's counter grows with the tokens computed and sampled for it, each multiplied by its cost
and divided by the tenant's weight. A tenant that starts to wait after a pause is raised to the
smallest counter among waiting tenants: unused service is not saved up. Nothing is counted before a
second tenant comes, whose counter would begin where the first one's is.
"""

from collections.abc import Iterable

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0  # a decode step computes fewer tokens at once, and its KV stays longer
_PRUNE_AT = 1024


class FairShare:
    """Counters by tenant. A tenant at or below the floor needs none and is forgotten."""

    def __init__(self, weights: Iterable[tuple[str, float]]) -> None:
        self._weights = dict(weights)
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # no tenant that starts to wait is below
        self._last_served: str | None = None
        self._prune_at = _PRUNE_AT
        self._only_tenant: str | None = None  # that has come, while there is no other
        self.is_shared = False  # between several tenants

    def counter(self, tenant: str) -> float:
        """Service received by a tenant, in weighted tokens."""
        return self._counters.get(tenant, self._floor)

    def enter(self, tenant: str, least: float | None) -> None:
        """Starts counting a waiting tenant; `least` is the smallest counter of the others."""
        if not self.is_shared:
            self.is_shared = self._only_tenant not in (None, tenant)
            self._only_tenant = tenant
        if least is None and self._last_served is not None:
            # No tenant waits: service given to the last one since then is no credit for this one.
            least = self.counter(self._last_served)
        self._floor = max(self._floor, least or 0.0)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def leave(self, tenant: str) -> None:
        """Records that none of a tenant's sequences waits any more."""
        self._last_served = tenant
        if len(self._counters) >= self._prune_at:
            self._prune()

    def charge_prompt(self, tenant: str, num_tokens: int) -> None:
        """Charges computed prompt tokens; those found in the prefix cache cost nothing."""
        self._charge(tenant, PROMPT_TOKEN_COST * num_tokens)

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        """Charges sampled tokens."""
        self._charge(tenant, OUTPUT_TOKEN_COST * num_tokens)

    def _charge(self, tenant: str, cost: float) -> None:
        if not self.is_shared:
            return
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)

    def _prune(self) -> None:
        above = {t: counter for t, counter in self._counters.items() if counter > self._floor}
        self._counters = above  # the others read as the floor already
        self._prune_at = max(_PRUNE_AT, 2 * len(self._counters))
