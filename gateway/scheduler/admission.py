"""Tells the task that answers a client that its request was submitted."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Whether a request, or one of a call's, has passed all checks of the gateway."""

    is_given: bool = False


# Of the call that the current task and its children serve; None where no task asks.
ADMISSION: ContextVar[Admission | None] = ContextVar("ADMISSION", default=None)


def note_admission() -> None:
    """Says that a request was submitted."""
    admission = ADMISSION.get()
    if admission is not None:
        admission.is_given = True
