"""Decides which request to blame when worker after worker is lost.

A request that crashes its workers must be stopped; one that only happened to run when a worker died
must not be. A worker lost in its very first step makes the step's requests suspect; one that has
completed steps may have died of anything.
"""

from dataclasses import dataclass

MAX_STRIKES = 3  # workers in a row that were lost in their first step
MAX_LOSSES = 16  # workers lost without a new token in between


@dataclass(slots=True)
class Strikes:
    """Worker losses of one request since its newest token."""

    num_tokens: int = 0
    num_strikes: int = 0
    num_losses: int = 0

    def note(self, num_tokens: int, is_first_step: bool) -> None:
        """Adds a loss of a worker in a step of the request, which has `num_tokens` tokens."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_strikes, self.num_losses = num_tokens, 0, 0
        self.num_strikes = self.num_strikes + 1 if is_first_step else 0
        self.num_losses += 1

    @property
    def are_out(self) -> bool:
        """Whether the request should be given up."""
        return self.num_strikes >= MAX_STRIKES or self.num_losses >= MAX_LOSSES
