"""Step time model: a base, a time per computed token and a time per context token.

Fitted by least squares to measured steps, with exponentially fading weights.
"""

from dataclasses import dataclass

import numpy as np

_FADE = 0.99  # factor on older observations' weight per new one
_MIN_OBSERVATIONS = 3
_RIDGE = 1e-9  # on each diagonal: identical steps cannot separate the terms


@dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients in seconds, none negative."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_context_token_s: float = 0.0

    def of(self, num_tokens: float, num_context_tokens: float) -> float:
        """The time of one step, in seconds."""
        return (
            self.base_s
            + self.per_token_s * num_tokens
            + self.per_context_token_s * num_context_tokens
        )


class StepTimeFit:
    """Normal equations of the fit, updated in constant time per step."""

    def __init__(self) -> None:
        self.num_observations = 0
        self._moments = np.zeros((3, 3))
        self._targets = np.zeros(3)

    def observe(self, num_tokens: int, num_context_tokens: int, duration_s: float) -> None:
        """Adds one measured step."""
        features = np.array((1.0, num_tokens, num_context_tokens))
        self._moments *= _FADE
        self._moments += features[:, None] * features
        self._targets *= _FADE
        self._targets += features * duration_s
        self.num_observations += 1

    def solve(self) -> StepTime | None:
        """The best fit; None with fewer than 3 observations."""
        if self.num_observations < _MIN_OBSERVATIONS:
            return None
        parts = [0, 1, 2]
        while True:
            # The features differ by orders of magnitude; after scaling, one small ridge suits all.
            scale = np.sqrt(self._moments.diagonal()[parts]) + 1e-30
            moments = self._moments[np.ix_(parts, parts)] / np.outer(scale, scale)
            moments += _RIDGE * np.eye(len(parts))
            values = np.linalg.solve(moments, self._targets[parts] / scale) / scale
            if (values >= 0).all():
                break
            # A negative coefficient is noise: refit without it.
            parts.pop(int((values * scale).argmin()))
        found = np.zeros(3)
        found[parts] = values
        return StepTime(*found.tolist())
