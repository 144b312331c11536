"""The output of `pagewire up`: a line for each finished step, and a line that is rewritten."""

import shutil
import sys
import time

from pagewire._terminal import StatusLine, Style

REPORT_S = 10.0  # interval of progress lines where they cannot be rewritten


class Journal:
    """Prints finished steps and their time to stdout."""

    def __init__(self) -> None:
        self.style = Style(sys.stdout)
        self._line = StatusLine(sys.stdout)
        self._start_s = time.monotonic()
        self._next_s = self._start_s + REPORT_S

    def say(self, text: str) -> None:
        """Prints one line."""
        self._line.clear()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def done(self, what: str, detail: str) -> None:
        """Prints a finished step, with the seconds since the start."""
        seconds = self.style.dim(f"{time.monotonic() - self._start_s:.1f} s")
        self.say(f"{self.style.green(f'{what:<10}')}{detail}  {seconds}")

    def waiting(self, what: str, reason: str = "") -> None:
        """Shows a slow step: rewritten in place on a terminal, printed now and then elsewhere."""
        now_s = time.monotonic()
        text = f"{what}, {now_s - self._start_s:.0f} s{reason and f': {reason}'}"
        self._line.show(self.style.dim(text[: shutil.get_terminal_size().columns - 1]))
        if now_s >= self._next_s and not sys.stdout.isatty():
            self._next_s = now_s + REPORT_S
            self.say(text)
