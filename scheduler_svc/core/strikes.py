"""Which request is to blame when worker after worker is lost: the one that never gets further.

A request that kills whoever computes it must not go on killing; one that merely ran when a worker
died must not be given up. What tells them apart is the place: how many tokens were known, and how
many of them computed, when the step began that never ended.
"""

from dataclasses import dataclass

MAX_STRIKES = 3  # losses without getting further than at the one before
MAX_LOSSES = 8  # without a single token in between


@dataclass(slots=True)
class Strikes:
    """The losses of one request since its newest token."""

    num_strikes: int = 0
    num_losses: int = 0
    num_tokens: int = 0
    num_computed: int = 0

    def note(self, num_tokens: int, num_computed: int) -> None:
        """A worker was lost in a step that would have computed the request from there on."""
        if num_tokens > self.num_tokens:
            self.num_strikes = self.num_losses = 0
        elif num_computed > self.num_computed:
            self.num_strikes = 0
        self.num_strikes += 1
        self.num_losses += 1
        self.num_tokens, self.num_computed = num_tokens, num_computed

    @property
    def are_out(self) -> bool:
        """Whether that was once too often."""
        return self.num_strikes >= MAX_STRIKES or self.num_losses >= MAX_LOSSES
