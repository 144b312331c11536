"""Logits as the ranks have them: each those of its own part of the vocabulary.

Making rows whole moves a vocabulary per row between the ranks, so only code that cannot
work on a part does it.
"""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.parallel import ALONE, Group


@dataclass(frozen=True, slots=True)
class VocabPart:
    """One rank's logits of a step's rows; the defaults are those of a rank that has all."""

    logits: Tensor  # [R, V / size], of consecutive tokens
    first_token: int = 0
    group: Group = ALONE  # the ranks that have the other parts, in the order of the tokens

    def whole(self) -> Tensor:
        """The rows' logits [R, V]; every rank has to ask for them."""
        return self.group.all_gather(self.logits)
