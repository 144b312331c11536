"""Measures the phases of a start-up, from the start of the process."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_FIELD = 21  # of /proc/self/stat: start time in ticks since boot


class StartTimer:
    """Time per phase. `imports` is the time before the clock was created."""

    def __init__(self, imports_s: float | None = None) -> None:
        imports_s = process_age_s() if imports_s is None else imports_s
        self._began_s = time.monotonic() - imports_s
        self._phases_s = {"imports": imports_s}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to a phase; a phase may be entered several times."""
        entered_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - entered_s
            self._phases_s[name] = self._phases_s.get(name, 0.0) + took_s

    def report(self) -> str:
        """Returns all phases in milliseconds, such as `6120 ms (imports 3010, weights 450)`.

        The total includes time between phases.
        """
        total_ms = round((time.monotonic() - self._began_s) * 1e3)
        phases = ", ".join(f"{name} {round(s * 1e3)}" for name, s in self._phases_s.items())
        return f"{total_ms} ms ({phases})"


def process_age_s() -> float:
    """Seconds since this process was started."""
    # The second field is the command in parentheses and may contain any character.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[_START_FIELD - 2]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
