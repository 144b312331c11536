"""How long outputs turn out, learned from those that ended: for forecasts only.

Callers that set max_tokens are judged by the share of it that gets used, the others by the length.
"""

from scheduler_svc.core.sequence import Sequence

_WEIGHT = 0.05  # of the newest


class OutputLengths:
    """Fading means."""

    def __init__(self) -> None:
        self._used_share = 1.0
        self._length: float | None = None

    def observe(self, sequence: Sequence, num_output: int) -> None:
        """An output that came to its natural end."""
        max_tokens = sequence.request.max_tokens
        if max_tokens is not None:
            share = num_output / (sequence.max_len - sequence.num_prompt)
            self._used_share += _WEIGHT * (share - self._used_share)
        elif self._length is None:
            self._length = float(num_output)
        else:
            self._length += _WEIGHT * (num_output - self._length)

    def left(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens that a sequence with so many will probably still generate; at least one."""
        most = sequence.max_len - num_tokens
        if sequence.request.max_tokens is not None:
            return max(round(self._used_share * most), 1)
        if self._length is None:
            return max(most, 1)
        expected = round(self._length) - (num_tokens - sequence.num_prompt)
        return max(min(expected, most), 1)
