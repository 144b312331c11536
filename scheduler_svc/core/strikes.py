"""Which request is to blame when worker after worker is lost.

A request that kills whoever computes it must not go on killing; one that merely ran when a worker
died must not be given up. A worker that is lost in the very first step that it computes is
suspicious; one that has done some may have died of anything.
"""

from dataclasses import dataclass

MAX_STRIKES = 3  # workers in a row that did no step but died of one
MAX_LOSSES = 16  # workers, without a single token in between


@dataclass(slots=True)
class Strikes:
    """The losses of one request since its newest token."""

    num_tokens: int = 0
    num_strikes: int = 0
    num_losses: int = 0

    def note(self, num_tokens: int, is_first_step: bool) -> None:
        """A worker was lost in a step of the request, which has so many tokens."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_strikes, self.num_losses = num_tokens, 0, 0
        self.num_strikes = self.num_strikes + 1 if is_first_step else 0
        self.num_losses += 1

    @property
    def are_out(self) -> bool:
        """Whether that was once too often."""
        return self.num_strikes >= MAX_STRIKES or self.num_losses >= MAX_LOSSES
