"""The time to wait for a sign of life, from a peer that may be slow and not gone.

The least suits a machine with time to spare. Where signs come late the limit is a multiple of the
longest wait lately, and a wait that was given up doubles the next one; all of it up to a bound, so
that a peer that is gone is still noticed. Knows no clock: time comes in.
"""

_MARGIN = 3.0  # times the longest wait that ended well
_HALF_LIFE_S = 60.0  # in which half of what was learned is forgotten


class Patience:
    """One peer's limit in seconds."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._wanted_s = 0.0  # by what was seen

    @property
    def limit_s(self) -> float:
        """After so long without a sign the peer is given up."""
        return min(max(self._least_s, self._wanted_s), self._most_s)

    def heard(self, after_s: float) -> None:
        """A sign came, after so long a wait."""
        self._wanted_s = max(self._wanted_s, _MARGIN * after_s)

    def gave_up(self) -> None:
        """None came within the limit. If the peer lives after all, it will have twice as long."""
        self._wanted_s = 2 * self.limit_s

    def fade(self, elapsed_s: float) -> None:
        """Time passes, and old delays count for less."""
        self._wanted_s *= 0.5 ** (elapsed_s / _HALF_LIFE_S)

    def forget(self) -> None:
        """The peer is another one."""
        self._wanted_s = 0.0
