"""Beam search: the value of `beam_search`."""

from dataclasses import dataclass
from typing import Literal

from pagewire._errors import InvalidArgument
from pagewire._messages.fields import set_fields
from pagewire.v1 import inference_pb2 as pb

_EARLY_STOPPING = {
    False: pb.EARLY_STOPPING_FALSE,
    True: pb.EARLY_STOPPING_TRUE,
    "never": pb.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Search for the likeliest outputs, by the rules of transformers' `generate(num_beams=...)`.

    `num_beams` sequences, 1 to 16, are kept at each token. An output of L tokens scores the sum of
    their log probabilities divided by L ** length_penalty.

    >>> BeamSearch(4, early_stopping=True).length_penalty
    1.0
    """

    num_beams: int
    length_penalty: float = 1.0  # from -10 to 10
    # Once num_beams outputs have finished: True ends the search, False where no other sequence
    # would score better now, "never" where none would at any length.
    early_stopping: bool | Literal["never"] = False


def to_beam_search(beams: BeamSearch) -> pb.BeamSearch:
    """The search as a message. Raises InvalidArgument."""
    if not isinstance(beams, BeamSearch):
        kind = type(beams).__name__
        raise InvalidArgument(f"beam_search: must be a BeamSearch, not {kind}")
    if beams.early_stopping not in _EARLY_STOPPING:
        known = "neither True, False nor 'never'"
        raise InvalidArgument(f"early_stopping: {beams.early_stopping!r} is {known}")
    message = pb.BeamSearch(early_stopping=_EARLY_STOPPING[beams.early_stopping])
    numbers = {"num_beams": beams.num_beams, "length_penalty": beams.length_penalty}
    set_fields(message, numbers)
    return message
