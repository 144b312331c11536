"""Decides which request to blame when processes die.

A request that kills its workers must be stopped; one that only happened to run when a worker died
must not be. After a death each request of the step in flight is suspect: it computes alone, in
steps of its own, until it has passed the place where it was (`place`). So a second death there is
its own doing, and not that of another. A request that passes each place and meets one death after
the other all the same ends after many. Losses of a stream whose worker lives count for less.
"""

from dataclasses import dataclass

MAX_DEATHS = 2  # at one place; then the request ends
MAX_DEATHS_IN_ALL = 16  # wherever it was
MAX_FIRST_STEP_LOSSES = 3  # workers in a row that were lost in their first step
MAX_LOSSES = 16  # workers lost without a new token in between


@dataclass(slots=True)
class Blame:
    """Worker losses of one request since its newest token, and deaths at one place."""

    num_tokens: int = 0
    num_first_step_losses: int = 0
    num_losses: int = 0
    num_deaths: int = 0
    num_deaths_in_all: int = 0
    place: int = 0  # tokens computed once the step in flight at the last death would have been done
    is_suspect: bool = False  # it has not passed that place since

    def note(self, num_tokens: int, is_first_step: bool) -> None:
        """Adds a loss of a worker in a step of the request, which has `num_tokens` tokens."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_first_step_losses, self.num_losses = num_tokens, 0, 0
        self.num_first_step_losses = self.num_first_step_losses + 1 if is_first_step else 0
        self.num_losses += 1

    def note_death(self, place: int) -> None:
        """Adds a death in a step after which the request would have computed `place` tokens."""
        self.num_deaths = self.num_deaths + 1 if self.is_suspect else 1
        self.num_deaths_in_all += 1
        self.place = max(place, self.place) if self.is_suspect else place
        self.is_suspect = True

    def computed(self, num_tokens: int) -> None:
        """Clears the request once it has computed more than the last death let it."""
        self.is_suspect = self.is_suspect and num_tokens < self.place

    @property
    def should_give_up(self) -> bool:
        """Whether the request should be given up."""
        return self.is_poison or (
            self.num_first_step_losses >= MAX_FIRST_STEP_LOSSES or self.num_losses >= MAX_LOSSES
        )

    @property
    def is_poison(self) -> bool:
        """Whether processes die where the request is computed."""
        died_again = self.is_suspect and self.num_deaths >= MAX_DEATHS
        return died_again or self.num_deaths_in_all >= MAX_DEATHS_IN_ALL
