"""Tells the task that answers a client that its request was submitted."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Submitted:
    """A mark that a request, or one of a call's, has passed all checks of the gateway."""

    is_done: bool = False


# Of the call that the current task and its children serve; None where no task asks.
SUBMITTED: ContextVar[Submitted | None] = ContextVar("SUBMITTED", default=None)


def note_submitted() -> None:
    """Says that a request was submitted."""
    submitted = SUBMITTED.get()
    if submitted is not None:
        submitted.is_done = True
