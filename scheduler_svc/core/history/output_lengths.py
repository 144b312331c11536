"""Estimates output lengths from requests that have ended; used by forecasts only.

For requests with max_tokens it estimates the fraction of it that is used, for others the length.
"""

from scheduler_svc.core.request.sequence import Sequence

_WEIGHT = 0.05  # weight of the newest output


class OutputLengths:
    """Exponential moving averages."""

    def __init__(self) -> None:
        self._used_share = 1.0
        self._length: float | None = None

    def observe(self, sequence: Sequence, num_output: int) -> None:
        """Adds an output that ended by a stop token or a length limit."""
        max_tokens = sequence.request.max_tokens
        if max_tokens is not None:
            share = num_output / (sequence.max_len - sequence.num_prompt)
            self._used_share += _WEIGHT * (share - self._used_share)
        elif self._length is None:
            self._length = float(num_output)
        else:
            self._length += _WEIGHT * (num_output - self._length)

    def left(self, sequence: Sequence, num_tokens: int) -> int:
        """Expected number of tokens, at least 1, that a sequence will still generate."""
        most = sequence.max_len - num_tokens
        if sequence.request.max_tokens is not None:
            return max(round(self._used_share * most), 1)
        if self._length is None:
            return max(most, 1)
        expected = round(self._length) - (num_tokens - sequence.num_prompt)
        return max(min(expected, most), 1)
