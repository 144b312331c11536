"""A step that CUDA computes: what its launch brings, and the wait for it.

Knows how the parts of an answer come to the host, not how they are computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.step_clock import StepClock
from worker_svc.protocol.step import IntColumn, StepOutput, StepTimings
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_sampling import SampleExtras
from worker_svc.runner.device_slots import SlotSnapshot, SlotsOnDevice
from worker_svc.runner.model_runner import Drawn, ModelRunner, failed, to_output
from worker_svc.runner.refusals import with_refusals
from worker_svc.runner.rows import Rows
from worker_svc.sampling.prompt_outputs import DevicePromptOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result that a launch will bring; the default if it has no rows."""

    prepare_us: int = 0  # from its begin to the first of its work on the device; 0: it has none
    places: IntColumn | None = None  # of tokens in the ring's row; None: in the rows' order
    extras: SampleExtras = field(default_factory=SampleExtras)
    device_prompt_outputs: tuple[DevicePromptOutput, ...] = ()  # of prompts
    accepted: Drawn | None = None  # of a step with drafts, which are verified already


class RingTokens:
    """The tokens of a step in the ring, kept once they are read: the ring goes on."""

    def __init__(
        self,
        slots: SlotsOnDevice,
        ring_row: int,
        rows: Rows,
        places: IntColumn | None,
        clock: StepClock,
    ) -> None:
        self._ring_slots, self._ring_row = slots, ring_row
        self._slots = rows.slots[rows.samples]
        self._places = places
        self._clock = clock
        self._read: NDArray[np.int32] | None = None

    def read(self) -> NDArray[np.int32]:
        """The tokens [R] of the rows that sample, below 0 where logits were not finite.

        Valid once the step is done.
        """
        if self._read is None:
            tokens = self._ring_slots.tokens(self._ring_row, len(self._slots))
            self._read = tokens if self._places is None else tokens[self._places]
        return self._read

    def known(self, slots: IntColumn) -> Callable[[], IntColumn] | None:
        """The tokens [N] of some slots as their token rows have them; None: not all have sampled.

        The call waits for the step, without the interpreter's lock. Another thread may make it.
        """
        order = np.argsort(self._slots)
        places = np.searchsorted(self._slots, slots, sorter=order)
        places = order[np.minimum(places, len(order) - 1)]
        if not np.array_equal(self._slots[places], slots):
            return None

        def read() -> IntColumn:
            self._clock.block()
            return np.maximum(self.read()[places], 0).astype(np.int64)

        return read


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that runs on the device."""

    runner: ModelRunner
    staged: Staged
    clock: StepClock
    sampled: RingTokens | None  # None: no row samples to the ring
    computed: Computed
    timings: StepTimings
    started: float
    snapshot: SlotSnapshot | None = None  # the slots after it, if it wants their state

    def result(self) -> StepOutput:
        """Waits for the step. An error of the device that lasts ends the process."""
        step_id = self.staged.step.step_id
        try:
            self.clock.wait()
            drawn = self.computed.accepted or self.computed.extras.drawn(self._tokens())
            output = to_output(step_id, self.staged.rows, drawn, self._timings())
            if self.computed.device_prompt_outputs:
                prompt_outputs = tuple(
                    found.to_host() for found in self.computed.device_prompt_outputs
                )
                output = replace(output, prompt_outputs=prompt_outputs)
            output = with_refusals(self.staged, output)
            if self.snapshot is not None:
                output = replace(output, state=self.snapshot.hashes())
        except RuntimeError as error:
            log.exception("step %d failed on the device", step_id)
            self.runner.end_if_lost(error)
            output = failed(step_id, f"{type(error).__name__}: {error}")
        return output

    def record(self, output: StepOutput) -> None:
        """Notes it for the debug service: after the answer, which should not wait for this."""
        self.runner.record(self.staged, output, self.started)

    def _tokens(self) -> NDArray[np.int32]:
        return np.zeros(0, dtype=np.int32) if self.sampled is None else self.sampled.read().copy()

    def _timings(self) -> StepTimings:
        forward_us, sample_us, *_ = [*self.clock.spans_us(), 0, 0]
        before = self.timings
        return StepTimings(
            before.queue_us,
            before.prepare_us,
            forward_us,
            sample_us,
            idle_us=self.clock.idle_us(),
        )
