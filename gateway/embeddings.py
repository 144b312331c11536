"""Vectors that stand for prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ErrorKind, RequestError
from gateway.generation import Usage
from rpc.prompt_reports import HiddenMean, PromptReport


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt's hidden states, pooled."""

    vector: NDArray[np.float32]  # [hidden]
    usage: Usage

    def normalized(self) -> "Embedding":
        """Of length 1; a vector of zeros stays as it is."""
        length = float(np.linalg.norm(self.vector.astype(np.float64)))
        vector = self.vector / np.float32(length) if length else self.vector
        return Embedding(vector, self.usage)


def embedding_of(reports: Sequence[PromptReport], usage: Usage) -> Embedding:
    """From all that was told of a prompt. Raises RequestError when that is nothing."""
    mean = HiddenMean()
    for report in reports:
        if report.hidden_sum is not None:
            mean.add(report)
    value = mean.value()
    if value is None:
        raise RequestError(ErrorKind.INTERNAL, "the scheduler sent no hidden states")
    return Embedding(value.astype(np.float32), usage)
