"""Measures how long a stream has been silent whose other side sends something each second."""

MOST_SILENCE_S = 20.0  # longer than keepalive lets a connection stand still


class StreamSilence:
    """The silence of a stream whose other side sends something each second."""

    def __init__(self) -> None:
        self._since_s = 0.0  # by ticks: time in which this process itself stood still counts little
        self.is_over = False  # nothing came for too long

    @property
    def problem(self) -> str:
        """The problem in words."""
        return f"nothing came for {self._since_s:.0f} s"

    def tick(self, elapsed_s: float) -> bool:
        """Advances the time; returns whether it has lasted for too long."""
        self._since_s += elapsed_s
        self.is_over = self._since_s > MOST_SILENCE_S
        return self.is_over

    def end(self) -> None:
        """Something came."""
        self._since_s = 0.0
