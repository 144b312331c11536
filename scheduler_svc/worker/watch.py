"""Detects a lost or stuck worker from the frames that arrive, without reading a clock.

Time comes in as ticks, and a tick counts for little more than it should have taken: a process that
was stopped itself cannot say how long others were silent, and first reads what has come meanwhile.
How long a silence may be follows how long silences were that ended well: `wire.patience`.
"""

from collections import deque

from pagewire.v1 import worker_pb2
from wire.patience import Patience

TICK_S = 0.25
_LONGEST_TICK_S = 2 * TICK_S
_TICKS_OF_TRAVEL = 4  # a frame sent this long ago has arrived, unless it was lost
_MOST_SILENCE = 5.0  # times the least limit: a worker that is gone is noticed by then


def silence_patience(heartbeat_timeout_s: float) -> Patience:
    """The patience with one worker's silence."""
    return Patience(heartbeat_timeout_s, _MOST_SILENCE * heartbeat_timeout_s)


class Watch:
    """The health of one link. Methods that may detect a failure return the reason, or None."""

    def __init__(self, patience: Patience | None) -> None:
        """`patience` is None where the worker sends no heartbeats; it outlives the link."""
        self._patience = patience
        self._silent_s = 0.0
        self._was_behind = False  # by the heartbeat before, the worker lacked a frame
        self._num_sent = 0
        self._num_outputs = 0
        self._sent_by_tick: deque[int] = deque([0], maxlen=_TICKS_OF_TRAVEL)
        self._step_id: int | None = None
        self._step_s = 0.0

    @property
    def is_heard(self) -> bool:
        """True if signs of life come; without any a step may be long done."""
        return self._patience is None or self._silent_s < self._patience.limit_s / 2

    def frame_sent(self) -> None:
        """Counts a frame sent to the worker."""
        self._num_sent += 1

    def output_came(self) -> None:
        """Counts an output received from the worker."""
        self._end_silence()
        self._num_outputs += 1

    def heartbeat_came(self, heartbeat: worker_pb2.Heartbeat) -> str | None:
        """Compares the worker's counts of frames with those of this side."""
        self._end_silence()
        num_sent, num_received = heartbeat.num_frames_sent, heartbeat.num_frames_received
        if num_sent > self._num_outputs:
            return (
                f"an answer was lost: the worker sent {num_sent} frames, {self._num_outputs} came"
            )
        was_behind, self._was_behind = self._was_behind, num_received < self._sent_by_tick[0]
        # A worker that stood still may beat before it reads what has come meanwhile: once.
        if was_behind and self._was_behind:
            return f"a step was lost: {self._num_sent} were sent, the worker got {num_received}"
        return None

    def tick(self, elapsed_s: float) -> str | None:
        """Advances the time; returns the reason if the worker has been silent for too long."""
        self._silent_s += min(elapsed_s, _LONGEST_TICK_S)
        self._sent_by_tick.append(self._num_sent)
        if self._patience is None:
            return None
        self._patience.fade(elapsed_s)
        if self._silent_s > self._patience.limit_s:
            self._patience.gave_up()
            return f"no message from the worker for {self._silent_s:.1f} s"
        return None

    def _end_silence(self) -> None:
        if self._patience is not None:
            self._patience.heard(self._silent_s)
        self._silent_s = 0.0

    def step_s(self, step_id: int | None, elapsed_s: float) -> float:
        """Seconds for which step `step_id` has been the oldest in flight, at this tick."""
        if step_id is None or step_id != self._step_id:
            self._step_id, self._step_s = step_id, 0.0
        else:
            self._step_s += min(elapsed_s, _LONGEST_TICK_S)
        return self._step_s
