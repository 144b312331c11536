"""Tracks which host blocks hold KV, to detect copies that a real worker could not make."""

import numpy as np

from pagewire.v1.worker_pb2 import SchedulerOutput
from wire.columns import unpack


class InconsistentStep(ValueError):
    """Raised for a step that does not follow from the previous ones, naming the field."""


class HostBlocks:
    """Records swapped-out blocks, and checks swapped-in and copied ones."""

    def __init__(self, num_host_blocks: int) -> None:
        self._holds = np.zeros(num_host_blocks, dtype=np.bool_)

    def apply(self, step: SchedulerOutput) -> None:
        """Applies a step's block copies. Raises BadStep, naming the field."""
        if step.reset:
            self._holds[:] = False
        if step.swapped_out_block_ids or step.to_host_block_ids:
            self._holds[self._targets(step, "swapped_out_block_ids", "to_host_block_ids")] = True
        if step.from_host_block_ids or step.swapped_in_block_ids:
            self._targets(step, "from_host_block_ids", "swapped_in_block_ids")
            if not self._holds[unpack(step.from_host_block_ids)].all():
                raise InconsistentStep(
                    "from_host_block_ids: nothing was swapped out to one of them"
                )
        if step.copied_from_block_ids or step.copied_to_block_ids:
            targets = self._targets(step, "copied_from_block_ids", "copied_to_block_ids")
            if np.isin(targets, unpack(step.copied_from_block_ids)).any():
                raise InconsistentStep("copied_to_block_ids: one of them is copied itself")

    @staticmethod
    def _targets(step: SchedulerOutput, from_name: str, to_name: str) -> np.ndarray:
        sources = unpack(getattr(step, from_name), name=from_name)
        targets = unpack(getattr(step, to_name), name=to_name)
        if len(sources) != len(targets):
            raise InconsistentStep(
                f"{to_name}: {len(targets)} blocks for {len(sources)} {from_name}"
            )
        if len(np.unique(targets)) != len(targets):
            raise InconsistentStep(f"{to_name}: a block appears twice")
        return targets
