"""Stretches of an output: the answer, in which stop strings count, and all else."""

from typing import NamedTuple, Protocol


class Stretch(NamedTuple):
    """A piece of an output's text."""

    text: str
    is_answer: bool  # else it is reasoning, or marks where something begins or ends


class Stretches(Protocol):
    """Tells the stretches of one output apart, however its text was cut."""

    def push(self, text: str, *, is_last: bool = False) -> list[Stretch]:
        """The stretches that are certain after more text; all of them after the last."""
