"""Logits divided among the ranks by vocabulary.

Whole rows would move a vocabulary per row between the ranks, so only code that cannot work on a
part uses them.
"""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.parallel.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class VocabPart:
    """One rank's logits of a step's rows; by default those of a rank with all."""

    logits: Tensor  # [R, V / size], of consecutive tokens
    first_token: int = 0
    group: Group = ALONE  # the ranks that have the other parts, in the order of the tokens

    def whole(self) -> Tensor:
        """The rows' logits [R, V]; every rank must call it."""
        return self.group.all_gather(self.logits)
