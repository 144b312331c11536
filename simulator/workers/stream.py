"""The worker's end of a step stream: frames in, answers out, and cuts."""

import asyncio
from collections.abc import AsyncIterator, Iterator

from pagewire.v1 import worker_pb2


class FrameRefused(Exception):
    """Ends the stream with a message and a gRPC status, given by name."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class StepProgress:
    """The steps that have begun, and those that never will. For one thread at a time."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self._last_begun = hello.first_step_id - 1
        self._left_out: list[range] = []

    def begin(self, step_id: int) -> bool:
        """Marks a step as begun, so that it cannot be cut; False if it was cut before."""
        if any(step_id in ids for ids in self._left_out):
            return False
        self._last_begun = step_id
        return True

    def cut(self, cut: worker_pb2.Cut) -> worker_pb2.AttachResponse:
        """Takes back the steps that have not begun; returns the answer."""
        first = min(max(cut.first_step_id, self._last_begun + 1), cut.last_step_id + 1)
        self._left_out = [ids for ids in self._left_out if ids.stop > self._last_begun]
        self._left_out.append(range(first, cut.last_step_id + 1))
        skipped = worker_pb2.Skipped(first_step_id=first, last_step_id=cut.last_step_id)
        return worker_pb2.AttachResponse(skipped=skipped)


class WorkerStream:
    """Queues of received frames and answers to send, all on one event loop."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.epoch = hello.epoch
        self.beat = worker_pb2.Heartbeat()
        self.heartbeat_interval_s = hello.heartbeat_interval_ms / 1e3 or None
        # A refusal ends the stream with an error, None ends it normally.
        self.answers: asyncio.Queue[worker_pb2.AttachResponse | FrameRefused | None] = (
            asyncio.Queue()
        )
        self._steps: asyncio.Queue[worker_pb2.SchedulerOutput | None] = asyncio.Queue()
        self._progress = StepProgress(hello)

    async def read(self, requests: AsyncIterator[worker_pb2.AttachRequest]) -> None:
        """Receives frames: queues steps, applies cuts at once."""
        async for request in requests:
            self.beat.num_frames_received += 1
            if request.HasField("cut"):
                self.answers.put_nowait(self._progress.cut(request.cut))
            else:
                self._steps.put_nowait(request.step)
        self._steps.put_nowait(None)

    def say_draining(self) -> None:
        """Sends a heartbeat that says so, now, and says it in all later ones."""
        self.beat.is_draining = True
        self.answers.put_nowait(worker_pb2.AttachResponse(heartbeat=self.beat))

    async def next_frame(self) -> worker_pb2.SchedulerOutput | None:
        """The next step or grant; None at the end."""
        return await self._steps.get()

    def begin(self, step_id: int) -> bool:
        """Marks a step as begun, so that it cannot be cut; False if it was cut before."""
        return self._progress.begin(step_id)


def steps_of(frame: worker_pb2.SchedulerOutput) -> Iterator[worker_pb2.SchedulerOutput]:
    """The steps of a frame: its own, and the others that it grants."""
    yield frame
    for step_id in range(frame.step_id + 1, frame.step_id + frame.granted_steps):
        yield worker_pb2.SchedulerOutput(step_id=step_id, same_rows=True)
