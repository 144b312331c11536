"""Vocabulary parallelism: each rank has the logits of a part of the vocabulary.

Gathering whole rows moves a vocabulary per row between ranks, so it is left to code that needs
them.
"""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.parallel.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class VocabPart:
    """One rank's part of a step's logits; by default of a rank that has them all."""

    logits: Tensor  # [R, V / size], of consecutive tokens
    first_token: int = 0
    group: Group = ALONE  # the ranks with the other parts, in token order

    def whole(self) -> Tensor:
        """Gathers the logits of all ranks, [R, V]; a collective."""
        return self.group.all_gather(self.logits)
