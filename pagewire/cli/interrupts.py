"""Ctrl-C while an answer streams: it cancels the call, and raises nothing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Closeable(Protocol):
    """An object that an interrupt closes."""

    def close(self) -> None: ...


class Interrupts:
    """Closes a stream at Ctrl-C, however often it is pressed."""

    def __init__(self) -> None:
        self.have_come = False
        self._stream: Closeable | None = None

    def close(self, stream: Closeable) -> None:
        """From now on an interrupt closes this stream; at once, if one has come."""
        self._stream = stream
        if self.have_come:
            stream.close()

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal: another thread closes, since this one may be inside gRPC."""
        if not self.have_come and self._stream is not None:
            threading.Thread(target=self._stream.close, daemon=True).start()
        self.have_come = True


@contextmanager
def interrupts_close() -> Iterator[Interrupts]:
    """Ctrl-C closes the stream that is named within; call it in the main thread.

    KeyboardInterrupt can rise between any two instructions, so also where gRPC has taken a lock and
    is not yet bound to release it: every later call of the channel would then wait for ever.
    """
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.take)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
