"""A refused request: as the status of a call, and as the end of a request in a session."""

from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.statuses import overloaded_metadata


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Why a request is refused, and when to try again."""

    code: grpc.StatusCode
    message: str
    retry_after_s: float | None = None

    def to_finished(self, handle: int) -> scheduler_pb2.Finished:
        """The end of the session's request with this handle."""
        return scheduler_pb2.Finished(
            handle=handle,
            reason=types_pb2.FINISH_REASON_ERROR,
            status_code=self.code.value[0],
            message=self.message,
            retry_after_s=self.retry_after_s,
        )

    async def abort(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Ends the call."""
        if self.retry_after_s is None:
            await context.abort(self.code, self.message)
        metadata = overloaded_metadata(self.message, self.retry_after_s or 0.0)
        await context.abort(self.code, self.message, metadata)
