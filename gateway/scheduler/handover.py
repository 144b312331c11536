"""The time between two schedulers, in which requests are held."""

import time


class Handover:
    """From the loss of a stream, or the word of a scheduler that it will end, until one serves.

    In between new requests are held: that is a pause for them, too, and no error.
    """

    def __init__(self) -> None:
        self.is_announced = False  # by the scheduler at the other end of the open stream
        self._since_s: float | None = None

    def announce(self) -> None:
        """The scheduler takes nothing new on this stream."""
        self.is_announced = True
        self._since_s = time.monotonic()

    def stream_ended(self) -> None:
        """The stream is gone, and perhaps its scheduler with it."""
        self.is_announced, self._since_s = False, time.monotonic()

    def end(self) -> None:
        """The next scheduler serves."""
        self._since_s = None

    def lasts(self, limit_s: float) -> bool:
        """True if it is going on, and has not gone on for too long."""
        if self._since_s is None:
            return False
        return self.is_announced or time.monotonic() - self._since_s < limit_s
