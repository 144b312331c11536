"""Facts of an output under way that traces read; its owners know nothing of traces."""

from collections.abc import Sequence
from typing import Protocol


class TimedOutput(Protocol):
    """An output as its gateway sees it; times in seconds of one clock."""

    @property
    def scoped_id(self) -> str:
        """Its id at the scheduler: callers of different tenants may choose the same."""

    @property
    def started_s(self) -> float:
        """When it was submitted."""

    @property
    def first_token_s(self) -> float | None:
        """When its first token was read."""


class TimedArrivals(Protocol):
    """Arrivals from the scheduler, with their times."""

    @property
    def first_token_s(self) -> float | None:
        """When its first token came."""

    @property
    def losses_s(self) -> Sequence[float]:
        """When its schedulers were lost."""
