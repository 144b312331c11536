"""Options of a request's beam search."""

from dataclasses import dataclass
from typing import Literal

from gateway.errors.request_errors import invalid

MAX_BEAMS = 16
MOST_PENALTY = 10.0  # a power of the length that no sum of log probabilities overflows
NEVER: Literal["never"] = "never"

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamNames:
    """Names that the API of a request gives these fields, for errors."""

    num_beams: str
    num_outputs: str = "n"
    length_penalty: str = "length_penalty"


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """A beam search, with the rules of `transformers`' `generate(num_beams=...)`.

    A finished output of L tokens is scored by the sum of its log probabilities, divided by
    L ** length_penalty. With `early_stopping` true the search ends as soon as `num_beams` outputs
    have finished; with false when no running one would score better if it ended now; with "never"
    when none would at the length that suits it best. Raises RequestError naming a bad field.
    """

    num_beams: int
    names: BeamNames
    num_outputs: int = 1  # the best ones
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        names = self.names
        if not 1 <= self.num_beams <= MAX_BEAMS:
            raise invalid(names.num_beams, f"{self.num_beams} is outside [1, {MAX_BEAMS}]")
        if not 1 <= self.num_outputs <= self.num_beams:
            problem = f"{self.num_outputs} is outside [1, {self.num_beams}], the number of beams"
            raise invalid(names.num_outputs, problem)
        is_inside = -MOST_PENALTY <= self.length_penalty <= MOST_PENALTY
        if not is_inside:  # also true for NaN
            limits = f"[-{MOST_PENALTY:g}, {MOST_PENALTY:g}]"
            raise invalid(names.length_penalty, f"is outside {limits}")
