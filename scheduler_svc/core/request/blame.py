"""Decides which request to blame when processes die.

A request that kills its workers must be stopped; one that only happened to run when a worker died
must not be. After a death each request of the step in flight is suspect: it computes alone, in
steps of its own, until it has passed the place where it was (`place`). So a second death there is
its own doing, and not that of another. A request that passes each place and meets one death after
the other all the same ends after many. A worker that ends its stream and lives has refused a step:
that isolates the requests of its steps, too, and two refusals at one place end the request. A
connection that was lost, and a worker that was asked to end, count for nothing.
"""

from dataclasses import dataclass

MAX_DEATHS = 2  # at one place; then the request ends
MAX_DEATHS_IN_ALL = 16  # wherever it was
MAX_REFUSALS, MAX_REFUSALS_IN_ALL = 2, 16  # likewise


@dataclass(slots=True)
class Blame:
    """Deaths of workers and refusals of steps that struck one request."""

    num_refusals: int = 0
    num_refusals_in_all: int = 0
    num_deaths: int = 0
    num_deaths_in_all: int = 0
    place: int = 0  # tokens computed once the step in flight at the last one would have been done
    is_suspect: bool = False  # it has not passed that place since

    def note_death(self, place: int) -> None:
        """Adds a death in a step after which the request would have computed `place` tokens."""
        self._suspect(place)
        self.num_deaths += 1
        self.num_deaths_in_all += 1

    def note_refusal(self, place: int) -> None:
        """Adds a refusal of such a step, or of one that was planned on top of it."""
        self._suspect(place)
        self.num_refusals += 1
        self.num_refusals_in_all += 1

    def _suspect(self, place: int) -> None:
        if not self.is_suspect:
            self.num_deaths = self.num_refusals = self.place = 0
        self.place = max(place, self.place)
        self.is_suspect = True

    def computed(self, num_tokens: int) -> None:
        """Clears the request once it has computed more than the last of them let it."""
        self.is_suspect = self.is_suspect and num_tokens < self.place

    @property
    def should_give_up(self) -> bool:
        """True if the request should be given up."""
        is_refused = self.is_suspect and self.num_refusals >= MAX_REFUSALS
        return self.is_poison or is_refused or self.num_refusals_in_all >= MAX_REFUSALS_IN_ALL

    @property
    def is_poison(self) -> bool:
        """True if processes die where the request is computed."""
        died_again = self.is_suspect and self.num_deaths >= MAX_DEATHS
        return died_again or self.num_deaths_in_all >= MAX_DEATHS_IN_ALL
