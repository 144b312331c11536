"""Finds out whether the worker of a lost stream has died, or only a connection was lost.

Its next answer tells: the same incarnation lives. Requests stay where they are until then. Where
other worker groups could compute them, an address without a process, or one that has not answered
for a while, counts as a death, so that they do not wait for a host that is gone.
"""

import time
from collections.abc import Callable

from scheduler_svc.worker.link import LinkLost
from wire.deaths import PeerLoss

LONGEST_S = 2.0  # while other groups could go on


class LossVerdict:
    """A group's verdict: open from a loss that is unclear until it is known what that was."""

    def __init__(self, has_others: Callable[[], bool] = lambda: False) -> None:
        """`has_others` says whether other groups take requests."""
        self._has_others = has_others
        self._since_s: float | None = None
        self.why_lost = ""

    @property
    def is_open(self) -> bool:
        """True if it is not known yet."""
        return self._since_s is not None

    def begin(self, why_lost: str) -> None:
        """A stream was lost, and why is unclear."""
        self._since_s, self.why_lost = time.monotonic(), why_lost

    def end(self) -> None:
        """It is known."""
        self._since_s = None

    def is_death_by(self, failure: LinkLost) -> bool:
        """True if the worker counts as dead, by a failed attempt to attach to it again."""
        if self._since_s is None:
            return False
        if failure.loss is PeerLoss.DEATH:  # another process answered
            return True
        is_late = time.monotonic() - self._since_s > LONGEST_S
        return self._has_others() and (failure.is_unreached or is_late)
