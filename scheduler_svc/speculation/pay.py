"""Whether drafts pay: what steps of each size took, and how often drafts come true.

A step with drafts computes more tokens, and the rows that have them await its answer before they
go on. So it pays by measure alone: on one device the next seven tokens are nearly free, on another
each costs half a step.
"""

from dataclasses import dataclass

_FADE = 0.9  # of what was measured, with each new step of the same size
MARGIN = 1.03  # a gain of pace below this is noise


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of the next step."""

    num_rows: int
    num_drafting: int  # those of them with drafts
    probability: float  # that a draft of theirs comes true, if those before it did


class StepCosts:
    """Seconds of decode steps by their number of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step without prompts took so long."""
        before = self._seconds.get(num_tokens, seconds)
        self._seconds[num_tokens] = _FADE * before + (1 - _FADE) * seconds

    def observe_best(self, num_tokens: int, seconds: float) -> None:
        """The same; if it is less than expected, what was before no longer counts."""
        if seconds < self._seconds.get(num_tokens, seconds):
            self._seconds[num_tokens] = seconds
        self.observe(num_tokens, seconds)

    @property
    def fewest(self) -> int | None:
        """The smallest number of tokens that was measured."""
        return min(self._seconds, default=None)

    def of(self, num_tokens: int) -> float | None:
        """Expected seconds, between those of the nearest sizes; beyond them, as the nearest took.

        None before any step was measured.
        """
        sizes = self._seconds
        if num_tokens in sizes or not sizes:
            return sizes.get(num_tokens)
        smaller = max((size for size in sizes if size < num_tokens), default=None)
        larger = min((size for size in sizes if size > num_tokens), default=None)
        if smaller is None or larger is None:
            return sizes[smaller if larger is None else larger]  # type: ignore[index]
        part = (num_tokens - smaller) / (larger - smaller)
        return sizes[smaller] + part * (sizes[larger] - sizes[smaller])


@dataclass(frozen=True, slots=True)
class BestLength:
    """A length of drafts, and what it saves."""

    length: int
    saved_s: float  # for each token of a row


def best_choice(batch: Batch, most: int, costs: StepCosts, draft_s: float = 0.0) -> BestLength:
    """The number of drafts per row that brings most tokens a second; 0: none pays.

    To make one draft for each row that drafts takes `draft_s`.
    """
    plain_s = costs.of(batch.num_rows)
    if plain_s is None or not batch.num_drafting:
        return BestLength(0, 0.0)
    others = batch.num_rows - batch.num_drafting
    plain_per_s = batch.num_rows / plain_s
    best, most_per_s = 0, MARGIN * plain_per_s
    came_true, expected = 1.0, 1.0  # tokens that a row with drafts brings
    for length in range(1, most + 1):
        came_true *= batch.probability
        expected += came_true
        num_verified = batch.num_rows + length * batch.num_drafting
        seconds = (costs.of(num_verified) or plain_s) + length * draft_s
        num_tokens = others + batch.num_drafting * expected
        if others:  # they go on in the step that the drafting rows await
            seconds += costs.of(others) or plain_s
            num_tokens += others
        if num_tokens / seconds > most_per_s:
            best, most_per_s = length, num_tokens / seconds
    saved_s = plain_s - batch.num_rows / most_per_s if best else 0.0
    return BestLength(best, saved_s)
