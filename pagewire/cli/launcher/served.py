"""The model that a scheduler serves, in one line: name, type and device."""

from pagewire._channel import Connection, open_channel
from pagewire._errors import PagewireError, translated
from pagewire.v1 import scheduler_pb2
from pagewire.v1.scheduler_pb2_grpc import SchedulerServiceStub

ASK_TIMEOUT_S = 5.0


def served(scheduler: Connection) -> str:
    """For the user alone, so a scheduler that does not answer is no failure."""
    try:
        with open_channel(scheduler) as channel, translated(scheduler.target):
            status = SchedulerServiceStub(channel).GetStatus(
                scheduler_pb2.GetStatusRequest(), **scheduler.terms(ASK_TIMEOUT_S)
            )
    except PagewireError as error:
        return f"unknown: {error}"
    model = status.model
    device = f" on {status.device}" if status.device else ""
    return f"{model.model}, {model.dtype}{device}, up to {model.max_model_len} tokens"
