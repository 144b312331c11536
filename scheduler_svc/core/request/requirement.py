"""Requirements: what a worker makes ready, apart from its steps, before a sequence may enter."""

from dataclasses import dataclass
from enum import Enum


class RequirementKind(Enum):
    """The kinds of what a worker makes ready."""

    GRAMMAR = "grammar"  # read, up to the place that the output so far has reached
    ADAPTER = "adapter"  # its weights, in the worker's memory
    ENCODER_OUTPUT = "encoder output"  # of a picture, ahead of the prompt that it stands in
    REMOTE_KV = "remote KV"  # computed by another worker


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that a request requires; a request may have several, no two of them equal."""

    kind: RequirementKind
    key: str = ""  # names it among those of its kind; of a grammar empty: the request holds it


GRAMMAR = Requirement(RequirementKind.GRAMMAR)
Requirements = tuple[Requirement, ...]


def adapter_requirement(adapter_id: str) -> Requirement:
    """The requirement of the adapter with this id."""
    return Requirement(RequirementKind.ADAPTER, adapter_id)
