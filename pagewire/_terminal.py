"""Colour, progress bar and status line for terminals; plain lines for everything else.

Colour is used only on terminals, and not where NO_COLOR is set (https://no-color.org).
"""

import os
import time
from collections.abc import Mapping
from typing import Self, TextIO

_CLEAR_LINE = "\r\x1b[K"


class Style:
    """Adds colour to text for one stream, if it is a terminal."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self.enabled = is_terminal(stream, environ) and not environ.get("NO_COLOR")

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def dim(self, text: str) -> str:
        return self._paint("2", text)

    def red(self, text: str) -> str:
        return self._paint("31", text)

    def green(self, text: str) -> str:
        return self._paint("32", text)

    def cyan(self, text: str) -> str:
        return self._paint("36", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled else text


def is_terminal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """True if lines on `stream` can be rewritten."""
    return stream.isatty() and environ.get("TERM") != "dumb"


def bar(fraction: float, width: int = 24) -> str:
    """A bar of `width` characters, filled to `fraction` (0 to 1)."""
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)


class StatusLine:
    """One line that is rewritten in place; prints nothing where that is impossible."""

    INTERVAL_S = 0.1

    def __init__(self, stream: TextIO, *, enabled: bool | None = None) -> None:
        self._stream = stream
        self._enabled = is_terminal(stream) if enabled is None else enabled
        self._next_s = 0.0
        self._is_shown = False

    def show(self, text: str, *, force: bool = False) -> None:
        """Replaces the line, at most ten times a second unless forced."""
        now_s = time.monotonic()
        if not self._enabled or (now_s < self._next_s and not force):
            return
        self._next_s = now_s + self.INTERVAL_S
        self._stream.write(_CLEAR_LINE + text)
        self._stream.flush()
        self._is_shown = True

    def clear(self) -> None:
        """Removes the line."""
        if self._is_shown:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_shown = False


class Progress:
    """A bar that counts finished items and estimates the remaining time."""

    def __init__(
        self, total: int, label: str, stream: TextIO, *, enabled: bool | None = None
    ) -> None:
        self._line = StatusLine(stream, enabled=enabled)
        self._style = Style(stream)
        self._total = total
        self._label = label
        self._num_done = 0
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        self._show()
        return self

    def advance(self) -> None:
        """Counts one more finished item."""
        self._num_done += 1
        self._show()

    def _show(self) -> None:
        fraction = self._num_done / self._total if self._total else 1.0
        elapsed_s = time.monotonic() - self._start_s
        left = f"{elapsed_s / fraction - elapsed_s:.0f} s left" if fraction else "..."
        counts = self._style.dim(f"{self._num_done}/{self._total}  {left}")
        text = f"{self._label} {self._style.cyan(bar(fraction))} {counts}"
        self._line.show(text, force=self._num_done == self._total)

    def __exit__(self, *_: object) -> None:
        self._line.clear()
