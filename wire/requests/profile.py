"""The options of a recording of steps, for scheduler and worker alike."""

from typing import Protocol

import grpc

MAX_STEPS = 1000
TIMEOUT_S, MAX_TIMEOUT_S = 60.0, 600.0  # the first where none is given
MOST_PER_MESSAGE = 5000  # intervals
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


class ProfileRequest(Protocol):
    """A ProfileStepsRequest."""

    steps: int
    timeout_s: float


class ProfileRefused(Exception):
    """Raised for a recording that cannot be; `code` is its gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_profile(request: ProfileRequest) -> float:
    """The seconds that a recording may take. Raises ProfileRefused, naming the field at fault."""
    if not 1 <= request.steps <= MAX_STEPS:
        raise ProfileRefused(_INVALID, f"steps: {request.steps} is outside [1, {MAX_STEPS}]")
    if not 0 <= request.timeout_s <= MAX_TIMEOUT_S:
        problem = f"timeout_s: {request.timeout_s} is outside [0, {MAX_TIMEOUT_S:g}]"
        raise ProfileRefused(_INVALID, problem)
    return request.timeout_s or TIMEOUT_S
