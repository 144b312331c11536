"""Decides when a scheduler that stands by takes the workers: only the workers are asked.

A worker is *held* while its scheduler lives, as the worker itself sees it. One held worker is
enough to stand by. Knows no clock: time comes in as ticks, and a tick counts for little more than
it should have taken, so that a process that was stopped itself asks again before it acts. Only what
was seen since the last tick counts: a worker whose answer is late is not known to be free.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from wire.patience import Patience

TICK_S = 0.2  # between two looks at the workers
HELD_PERIOD_S = 0.25  # in which an active scheduler says once that it lives
_LONGEST_TICK_S = 2 * TICK_S
_MOST_SILENCE = 5.0  # times the least limit
_KEPT_S = 2 * HELD_PERIOD_S  # a scheduler that keeps a worker without being attached may be silent
_FOR_NEW_WORKERS = 5.0  # times the delay

# An epoch is a term, in its upper bits, and a count of attachments. Two schedulers that take over
# at the same time have different lots, so that their terms differ: the higher one wins.
_COUNT_BITS, LOT_BITS = 20, 12


def next_term(highest_epoch: int, lot: int) -> int:
    """The first epoch of a term above that of every epoch up to the given one.

    `lot` is a number below 2**LOT_BITS that another scheduler hardly has.
    """
    term = (highest_epoch >> (_COUNT_BITS + LOT_BITS)) + 1
    return (term << LOT_BITS | lot) << _COUNT_BITS


@dataclass(frozen=True, slots=True)
class Sighting:
    """The word of a worker that is ready about its scheduler."""

    incarnation: int
    epoch: int  # the highest so far; 0: no scheduler has had it
    is_attached: bool | None  # None: an earlier version, which does not say
    unheard_s: float | None  # since its scheduler said that it lives; None: never


class Election:
    """The decision to stand by or to take over."""

    def __init__(self, delay_s: float, silence_s: float, lot: int, lookup_s: float = 0.0) -> None:
        """A worker must be free for `delay_s`; an attached scheduler may be silent `silence_s`.

        A scheduler that lives may find a new worker `lookup_s` seconds after this one has.
        """
        # Up to half as long again, by the lot: those that begin to wait at once rarely end at once.
        delay_s *= 1 + lot / 2 ** (LOT_BITS + 1)
        self._delay_s = delay_s
        self._delay_of_new_s = max(_FOR_NEW_WORKERS * delay_s, delay_s + lookup_s)
        self._silence = Patience(silence_s, _MOST_SILENCE * silence_s)
        self._silence_of_kept = Patience(_KEPT_S, _MOST_SILENCE * _KEPT_S)
        self._lot = lot
        self._free: dict[str, tuple[Sighting, float]] = {}  # address to first sighting, seconds
        self._last: dict[str, Sighting] = {}
        self._has_met_another = False
        self.why_waits = "no worker is known yet"
        self.is_warm = False  # another scheduler has the workers

    def tick(self, seen: Mapping[str, Sighting | None], elapsed_s: float) -> int | None:
        """The term to take the workers under, or None: wait on.

        `seen` has each known worker by address, None if it does not answer or is not ready. What
        is seen anew is another object, also if it says the same.
        """
        elapsed_s = min(elapsed_s, _LONGEST_TICK_S)
        for patience in (self._silence, self._silence_of_kept):
            patience.fade(elapsed_s)
        sightings = {address: one for address, one in seen.items() if one is not None}
        self._learn(sightings)
        held = [address for address, one in sightings.items() if self._is_held(one)]
        free = {a: one for a, one in sightings.items() if one.is_attached is not None}
        self.is_warm = bool(held)
        if held or not free:
            self._has_met_another |= bool(held)
            self._free = {}
            self.why_waits = self._why(seen, sightings, held)
            return None
        self._free = {a: (one, self._free_s(a, one, elapsed_s)) for a, one in free.items()}
        self.why_waits = "no scheduler has the workers: about to take them"
        if all(free_s < self._needed_s(one) for one, free_s in self._free.values()):
            return None
        return next_term(max(one.epoch for one in sightings.values()), self._lot)

    def _is_held(self, one: Sighting) -> bool:
        if one.unheard_s is None:  # its scheduler never says that it lives
            return bool(one.is_attached)
        return one.unheard_s < self._patience_with(one).limit_s

    def _patience_with(self, one: Sighting) -> Patience:
        return self._silence if one.is_attached else self._silence_of_kept

    def _learn(self, sightings: Mapping[str, Sighting]) -> None:
        """Silence means less where signs of life come late but come."""
        for address, one in sightings.items():
            before = self._last.get(address)
            if before is None or before.unheard_s is None or one.unheard_s is None:
                continue
            if one.is_attached == before.is_attached and one.unheard_s < before.unheard_s:
                self._patience_with(one).heard(before.unheard_s)
        self._last = dict(sightings)

    def _free_s(self, address: str, one: Sighting, elapsed_s: float) -> float:
        before = self._free.get(address)
        if before is None or _key(before[0]) != _key(one):
            return 0.0
        return before[1] if before[0] is one else before[1] + elapsed_s

    def _needed_s(self, one: Sighting) -> float:
        is_new = not one.epoch and one.unheard_s is None
        return self._delay_of_new_s if is_new and self._has_met_another else self._delay_s

    @staticmethod
    def _why(
        seen: Mapping[str, Sighting | None], sightings: Mapping[str, Sighting], held: list[str]
    ) -> str:
        if held:
            return f"another scheduler has worker {held[0]}, epoch {sightings[held[0]].epoch}"
        if sightings:
            address = next(iter(sightings))
            return f"worker {address} is of a version that does not say who has it: update it"
        return "no worker is ready" if seen else "no worker is known yet"


def _key(one: Sighting) -> tuple[int, int]:
    return one.incarnation, one.epoch
