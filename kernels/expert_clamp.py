"""The activation of experts whose gate and up are clamped: its two numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clamp:
    """(clamped up + 1) * g * sigmoid(alpha * g), where g is the clamped gate.

    The gate is at most the limit; up is within the limit on both sides.
    """

    limit: float
    alpha: float
