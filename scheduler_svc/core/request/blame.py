"""Decides which request to blame when worker after worker is lost.

A request that crashes its workers must be stopped; one that only happened to run when a worker died
must not be. A worker lost in its very first step makes the step's requests suspect; one that has
completed steps may have died of anything.
"""

from dataclasses import dataclass

MAX_FIRST_STEP_LOSSES = 3  # workers in a row that were lost in their first step
MAX_LOSSES = 16  # workers lost without a new token in between


@dataclass(slots=True)
class Blame:
    """Worker losses of one request since its newest token."""

    num_tokens: int = 0
    num_first_step_losses: int = 0
    num_losses: int = 0

    def note(self, num_tokens: int, is_first_step: bool) -> None:
        """Adds a loss of a worker in a step of the request, which has `num_tokens` tokens."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_first_step_losses, self.num_losses = num_tokens, 0, 0
        self.num_first_step_losses = self.num_first_step_losses + 1 if is_first_step else 0
        self.num_losses += 1

    @property
    def should_give_up(self) -> bool:
        """Whether the request should be given up."""
        return self.num_first_step_losses >= MAX_FIRST_STEP_LOSSES or self.num_losses >= MAX_LOSSES
