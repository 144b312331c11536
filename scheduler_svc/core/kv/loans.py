"""Blocks that stay held for other groups: those of sequences that leave, until they have moved.

The scheduler counts the references of both ends, so no lease runs out. A loan ends when the
receiver has answered, when its stream has ended, or with the worker whose blocks they are.
"""

from dataclasses import dataclass

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds
from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Leaving:
    """A sequence without a slot that moves once the steps that computed it are answered."""

    loan_id: int
    sequence: Sequence
    block_ids: BlockIds
    num_computed: int  # tokens with KV by then
    last_step: int  # that touches the blocks


class Loans:
    """The loans of one worker's blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lent: dict[int, BlockIds] = {}
        self._leaving: dict[int, Leaving] = {}

    def __len__(self) -> int:
        return len(self._lent)

    @property
    def held(self) -> BlockIds:
        """The blocks that are lent, each as often as it is."""
        return [block_id for block_ids in self._lent.values() for block_id in block_ids]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that wait to leave."""
        return [leaving.sequence for leaving in self._leaving.values()]

    def begin(self, leaving: Leaving) -> None:
        """Holds the blocks of a sequence that is to leave."""
        self._pool.share(leaving.block_ids)
        self._lent[leaving.loan_id] = leaving.block_ids
        self._leaving[leaving.loan_id] = leaving

    def due(self, acked_step: int) -> list[Leaving]:
        """The sequences that can go: no step touches them any more, and all that it brings came."""
        return [
            one
            for one in self._leaving.values()
            if one.last_step <= acked_step
            and not one.sequence.num_awaited
            and one.sequence.num_prompt_outputs_planned == one.sequence.num_prompt_outputs_delivered
        ]

    def left(self, loan_id: int) -> None:
        """Records that a sequence has left; its blocks stay lent."""
        del self._leaving[loan_id]

    def drop(self, sequence: Sequence) -> None:
        """Ends the loan of a sequence that does not leave any more."""
        for leaving in tuple(self._leaving.values()):
            if leaving.sequence is sequence:
                del self._leaving[leaving.loan_id]
                self.give_back(leaving.loan_id)

    def give_back(self, loan_id: int) -> None:
        """Ends a loan; no effect if there is none, as after the loss of the worker."""
        block_ids = self._lent.pop(loan_id, None)
        if block_ids is not None:
            self._pool.release(block_ids)
