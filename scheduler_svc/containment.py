"""After an exception at work on requests: the one at fault ends, the others go on.

An exception of ours must not end the loop, and must not leave a core that goes on wrong. So
the core is rebuilt from its tokens, every invariant is checked, and the process gives itself up if
one does not hold: the gateways hold all requests, too, and submit them to the next scheduler.
"""

import logging
import traceback

from scheduler_svc.core import Finished, Scheduler
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.request.fault import RequestFault

MOST_IN_A_ROW = 3  # exceptions without a step done in between, that no request is to blame for

logger = logging.getLogger(__name__)


class CoreBroken(Exception):
    """Raised when the core cannot be trusted any more; the process should end."""


class Containment:
    """The exceptions of one core so far."""

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._steps_before = 0

    def contain(
        self, core: Scheduler, error: Exception, at_fault: tuple[str, ...] = ()
    ) -> list[Finished]:
        """Rebuilds the core and ends the requests at fault, if any is known; returns their ends.

        Raises CoreBroken if an invariant does not hold then, or exceptions without a culprit go on.
        """
        if isinstance(error, RequestFault):
            at_fault = error.request_ids
        logger.error("an exception is contained, requests %s: %s", at_fault, cause_of(error))
        try:
            ends = core.salvage(at_fault, message_of(error))
            check_invariants(core)
        except Exception as broken:
            raise CoreBroken(f"the core does not hold after {cause_of(error)}") from broken
        self._judge(core, has_culprit=bool(ends))
        return ends

    def _judge(self, core: Scheduler, *, has_culprit: bool) -> None:
        went_on = core.num_output_tokens > self._steps_before
        self._steps_before = core.num_output_tokens
        self._num_in_a_row = 0 if has_culprit or went_on else self._num_in_a_row + 1
        if self._num_in_a_row >= MOST_IN_A_ROW:
            raise CoreBroken(f"{MOST_IN_A_ROW} exceptions in a row that no request is to blame for")


def cause_of(error: BaseException) -> str:
    """The kind of an exception and where it was raised; not its text, which may hold tokens."""
    error = error.__cause__ if isinstance(error, RequestFault) and error.__cause__ else error
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-4:]]
    return f"{type(error).__name__} at {' > '.join(places)}"


def message_of(error: BaseException) -> str:
    """The message that the request's client is told."""
    return f"internal error of the scheduler at work on this request: {cause_of(error)}"
