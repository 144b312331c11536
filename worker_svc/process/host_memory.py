"""The most memory that a piece of work needed of the host."""

import os
import threading
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.005
_STATM = Path("/proc/self/statm")


def own_bytes() -> int:
    """Bytes that this process owns now, without the pages of mapped files; 0 where unknown."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text(encoding="ascii").split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class HostPeak:
    """Looks at the process every few milliseconds while it is entered."""

    def __init__(self) -> None:
        self.begun_bytes = 0
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-peak", daemon=True)

    def report(self) -> str:
        """The most bytes, and those of them that were there before."""
        peak, begun = self.peak_bytes / 2**20, self.begun_bytes / 2**20
        return f"{peak:.0f} MiB at most, {begun:.0f} MiB before"

    def __enter__(self) -> "HostPeak":
        self.begun_bytes = self.peak_bytes = own_bytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, own_bytes())
