"""Compares the worker's state with the scheduler's: a hash per slot, at an interval of steps.

A frame asks for the hashes after its first step. The expected values are recorded when it is sent;
the last computed tokens are added when the answer arrives, because the last of them is known only
then. A slot that its sequence has left in the meantime is not compared, nor one that verifies
drafts, since only the answer says how far it gets.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import Scheduler, Sequence, StepPlan
from scheduler_svc.core.kv.slots import Index
from wire.state_hash import Hashes, StateHashes, block_weights, slot_hashes

_NAMED_SLOTS = 8  # most slots named in a message
_FEW_BLOCKS = 8  # appended since the last check; more are summed slot by slot


class StateDiffers(Exception):
    """Raised when the worker's slots differ from the plan."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """Expected state of the slots after a step, except the tokens."""

    slots: Index  # ascending
    sequences: list[Sequence]
    num_preemptions: list[int]
    num_computed: NDArray[np.int32]
    tables: Hashes
    is_free: NDArray[np.bool_]  # by slot: the worker must hold no sequence there


class StateCheck:
    """Compares one worker with one core, from the first step of a stream on."""

    def __init__(self, core: Scheduler, interval: int) -> None:
        """Checks every `interval` steps; 0 means never."""
        self._core = core
        # The hash is over group 0; the worker is not told of blocks freed by a window.
        self._interval = interval if core.config.groups[0].window is None else 0
        self._last_asked = core.last_step_id
        self._pending: dict[int, _Noted] = {}
        self.num_compared = 0
        self._weights = block_weights(core.view.max_blocks_per_seq)
        # Per slot: blocks of its table that are summed already, and their sum.
        self._num_summed = np.zeros(core.config.max_num_seqs, dtype=np.intp)
        self._sums = np.zeros(core.config.max_num_seqs, dtype=np.uint64)

    def wants(self, plan: StepPlan) -> bool:
        """True if the state is to be requested after this step, the first of the newest frame."""
        if not self._interval:
            return False
        for new in plan.new_sequences:
            self._num_summed[new.slot] = self._sums[new.slot] = 0
        if plan.step_id - self._last_asked < self._interval:
            return False
        self._last_asked = plan.step_id
        self._pending[plan.step_id] = self._note(plan)
        return True

    def skipped(self, first_step_id: int) -> None:
        """Drops checks from this step on, which will not be answered."""
        self._pending = {i: noted for i, noted in self._pending.items() if i < first_step_id}

    def compare(self, step_id: int, found: StateHashes | None) -> None:
        """Checks an answer before it is applied. Raises StateDiffers, naming slots."""
        noted = self._pending.pop(step_id, None)
        if noted is None:
            return
        if found is None:
            raise StateDiffers(f"the answer to step {step_id} lacks the requested state")
        self.num_compared += 1
        strangers = found.slots[noted.is_free[found.slots]]
        if len(strangers):
            raise StateDiffers(f"after step {step_id} the worker holds freed {_names(strangers)}")
        comparable = [n for n in range(len(noted.slots)) if self._is_there(noted, n)]
        slots, num_computed = noted.slots[comparable], noted.num_computed[comparable]
        tokens = self._core.view.token_ids[slots, num_computed - 1]
        expected = slot_hashes(slots, noted.tables[comparable], num_computed, tokens)
        told = dict(zip(found.slots.tolist(), found.hashes.tolist(), strict=True))
        pairs = zip(slots.tolist(), expected.tolist(), strict=True)
        if wrong := [slot for slot, value in pairs if told.get(slot) != value]:
            raise StateDiffers(
                f"after step {step_id} the worker's state differs in {_names(wrong)}"
            )

    def _note(self, plan: StepPlan) -> _Noted:
        view = self._core.view
        slots = view.settled_slots()
        self._sum_new_blocks(slots)
        num_computed = view.num_computed.copy()
        chunks = 1 if plan.num_scheduled is None else plan.num_scheduled
        num_computed[plan.slots] = plan.num_computed + chunks
        sequences = [s for s in map(view.sequence_in, slots.tolist()) if s is not None]
        return _Noted(
            slots=slots,
            sequences=sequences,
            num_preemptions=[sequence.num_preemptions for sequence in sequences],
            num_computed=num_computed[slots],
            tables=self._sums[slots],
            is_free=view.is_slot_free(),
        )

    def _sum_new_blocks(self, slots: Index) -> None:
        """Adds blocks appended since the last check to the sums; each block is summed once."""
        block_table, num_blocks = self._core.view.block_table, self._core.view.num_blocks_by_slot
        for slot in slots[num_blocks[slots] - self._num_summed[slots] > _FEW_BLOCKS].tolist():
            begin, end = int(self._num_summed[slot]), int(num_blocks[slot])
            added = block_table[slot, begin:end].astype(np.uint64) * self._weights[begin:end]
            self._sums[slot : slot + 1] += added.sum(dtype=np.uint64)  # a scalar would not wrap
            self._num_summed[slot] = end
        while len(slots := slots[self._num_summed[slots] < num_blocks[slots]]):
            at = self._num_summed[slots]
            self._sums[slots] += block_table[slots, at].astype(np.uint64) * self._weights[at]
            self._num_summed[slots] = at + 1

    def _is_there(self, noted: _Noted, number: int) -> bool:
        """True if a slot still has the recorded sequence, without a preemption in between."""
        sequence = noted.sequences[number]
        return (
            self._core.view.sequence_in(noted.slots[number]) is sequence
            and sequence.num_preemptions == noted.num_preemptions[number]
        )


def _names(slots: list[int] | NDArray[np.integer]) -> str:
    names = ", ".join(map(str, slots[:_NAMED_SLOTS]))
    more = len(slots) - _NAMED_SLOTS
    return f"slots {names}" + (f" and {more} more" if more > 0 else "")
