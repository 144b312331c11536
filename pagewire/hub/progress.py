"""The progress of a download, in one line."""

import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from pagewire._terminal import StatusLine, is_terminal

REPORT_S = 10.0  # where a line cannot be rewritten
MIB = 1 << 20


class ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a line now and then, if it takes long."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._line = StatusLine(self._stream)
        self._is_terminal = is_terminal(self._stream)
        self._next_s = time.monotonic() + REPORT_S

    def show(self, num_bytes: float, total: float) -> None:
        """Tells the progress if it is time to."""
        text = f"{self._label}: {num_bytes / MIB:.0f} of {total / MIB:.0f} MiB"
        self._line.show(text)
        now_s = time.monotonic()
        if not self._is_terminal and now_s >= self._next_s:
            self._next_s = now_s + REPORT_S
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Removes the line from a terminal."""
        self._line.clear()


def meter(line: ProgressLine) -> type[Any]:
    """A progress bar for huggingface_hub that draws nothing and tells the line of its bytes."""

    class Meter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self._counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                line.show(self.n, self.total or 0)

    return Meter
