"""Embeddings: one vector per prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.request.generation import Usage
from wire.prompt_outputs import HiddenMean, PromptOutput


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """The pooled hidden states of a prompt."""

    vector: NDArray[np.float32]  # [hidden]
    usage: Usage

    def normalized(self) -> "PromptEmbedding":
        """Scaled to length 1; a zero vector is unchanged."""
        length = float(np.linalg.norm(self.vector.astype(np.float64)))
        vector = self.vector / np.float32(length) if length else self.vector
        return PromptEmbedding(vector, self.usage)


def embedding_of(prompt_outputs: Sequence[PromptOutput], usage: Usage) -> PromptEmbedding:
    """The embedding from a prompt's reports. Raises RequestError when there are none."""
    mean = HiddenMean()
    for prompt_output in prompt_outputs:
        if prompt_output.hidden_sum is not None:
            mean.add(prompt_output)
    value = mean.value()
    if value is None:
        raise RequestError(ErrorKind.INTERNAL, "the scheduler sent no hidden states")
    return PromptEmbedding(value.astype(np.float32), usage)
