"""A step that CUDA computes: what its launch brings, and the wait for it.

Knows how the parts of an answer come to the host, not how they are computed.
"""

import logging
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.step_clock import StepClock
from worker_svc.protocol.step import IntColumn, StepOutput, StepTimings
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_sampling import SampleExtras
from worker_svc.runner.device_slots import SlotSnapshot, SlotsOnDevice
from worker_svc.runner.model_runner import Drawn, ModelRunner, failed, to_output
from worker_svc.sampling.prompt_outputs import DevicePromptOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a launch will bring; the default if it has no rows."""

    prepare_us: int = 0  # from its begin to the first of its work on the device; 0: it has none
    places: IntColumn | None = None  # of tokens in the ring's row; None: in the rows' order
    extras: SampleExtras = field(default_factory=SampleExtras)
    device_prompt_outputs: tuple[DevicePromptOutput, ...] = ()  # of prompts
    accepted: Drawn | None = None  # of a step with drafts, which are verified already


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that runs on the device."""

    runner: ModelRunner
    slots: SlotsOnDevice
    staged: Staged
    clock: StepClock
    ring_row: int | None  # None: no row samples to the ring
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
        if self.ring_row is None:
            return np.zeros(0, dtype=np.int32)
        num_sampled = int(np.count_nonzero(self.staged.rows.samples))
        tokens = self.slots.tokens(self.ring_row, num_sampled)
        return tokens if self.computed.places is None else tokens[self.computed.places]

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
