"""Why a scheduler's stream is refused or ended; the service maps each to a status."""


class SessionError(Exception):
    """Raised when a stream is refused, or ended by the worker."""


class UnknownProtocol(SessionError):
    """The scheduler uses another version of the step protocol."""


class StaleEpoch(SessionError):
    """The scheduler's epoch is not higher than the highest so far."""


class TakenOver(SessionError):
    """A scheduler with a higher epoch has attached."""


class StepGap(SessionError):
    """A step id is not the one after the previous step's."""


class Stopping(SessionError):
    """The worker is shutting down."""


class FrameLost(SessionError):
    """A frame is not the one that the scheduler sent next."""
