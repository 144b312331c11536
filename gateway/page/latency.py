"""The histograms of the time to first token and between tokens, for the live stream."""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.observe import declared
from wire.metrics.book import Book
from wire.metrics.declared import SECONDS

BOUNDS: dict[str, Any] = {"bounds_s": list(SECONDS)}


class LatencyCells:
    """Reads the counts of all of this gateway's processes, as /metrics does."""

    def __init__(self, book: Book, totals: Callable[[], list[float]]) -> None:
        self._totals = totals
        self._at = {"ttft": book.at(declared.TTFT), "itl": book.at(declared.ITL)}

    def read(self) -> Mapping[str, Any]:
        """Since the start: how many there were up to each bound and above the one before.

        The last is above all bounds.
        """
        totals, num_counts = self._totals(), len(SECONDS) + 1
        return {
            name: [int(count) for count in totals[at : at + num_counts]]
            for name, at in self._at.items()
        }
