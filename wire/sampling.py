"""The sampling rules that all services agree on."""

from dataclasses import dataclass

from wire.requests.numbers import FLOAT32_MAX, INT32_MAX

# Below this a temperature counts as 0: dividing by it would leave nothing but the maximum anyway.
GREEDY_TEMPERATURE = 1e-5

# Of a float32, as which numbers travel: a smaller one would arrive as 0.
SMALLEST_FLOAT = 1.2e-38


@dataclass(frozen=True, slots=True)
class SamplingNumber:
    """The range of a sampling parameter that is one number, and the values that change nothing."""

    low: float
    high: float
    off: tuple[float, ...]
    range_words: str  # the range, in messages
    is_open_below: bool = False

    def holds(self, value: float) -> bool:
        """True if a value is in the range; NaN is in none."""
        least = self.low + SMALLEST_FLOAT if self.is_open_below else self.low
        return least <= value <= self.high


NUMBERS = {
    "temperature": SamplingNumber(0, 2, (1,), "from 0 to 2"),
    "top_p": SamplingNumber(0, 1, (1,), "above 0 and at most 1", is_open_below=True),
    "min_p": SamplingNumber(0, 1, (0,), "from 0 to 1"),
    "top_k": SamplingNumber(-1, INT32_MAX, (-1, 0), "-1, 0 (both off) or more"),
    "presence_penalty": SamplingNumber(-2, 2, (0,), "from -2 to 2"),
    "frequency_penalty": SamplingNumber(-2, 2, (0,), "from -2 to 2"),
    "repetition_penalty": SamplingNumber(
        0, FLOAT32_MAX, (1,), "above 0 and finite", is_open_below=True
    ),
}
PENALTIES = tuple(name for name in NUMBERS if name.endswith("_penalty"))


def changing(sampling: object, *names: str) -> list[str]:
    """Name and value of each of these numbers of a request that is not off."""
    values = ((name, getattr(sampling, name)) for name in names)
    return [f"{name} {value:g}" for name, value in values if value not in NUMBERS[name].off]
