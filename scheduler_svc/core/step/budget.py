"""The number of tokens that a step may compute, and the share of each of its rows."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.config import SchedulerConfig


class StepBudget:
    """The limits of one step, in tokens: those of the config, and one that the caller may add."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold
        self._most_prompt_tokens: int | None = None

    def limit_prompts(self, most_prompt_tokens: int | None) -> None:
        """Sets the most prompt tokens of the next step, should rows decode in it; None: no more
        than the config allows."""
        self._most_prompt_tokens = most_prompt_tokens

    def beside(self, num_decodes: int) -> int:
        """The most tokens of a step in which so many rows decode, theirs included."""
        if self._most_prompt_tokens is None or not num_decodes:
            return self.most
        return min(self.most, num_decodes + self._most_prompt_tokens)

    def share(self, chunks: NDArray[np.int32]) -> int:
        """Cuts chunks [rows] to the budget: one token per decode, the rest to prompts in order.

        Returns the budget.
        """
        is_prompt = chunks > 1
        sizes = chunks[is_prompt]
        if self._threshold:
            sizes = np.minimum(sizes, self._threshold)
        num_single = int(np.count_nonzero(chunks == 1))
        most = self.beside(num_single)
        left = most - num_single - (np.cumsum(sizes) - sizes)
        chunks[is_prompt] = np.clip(left, 0, sizes)
        return most
