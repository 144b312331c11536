"""Prompt outputs of a worker without a model: fixed functions of the tokens.

A report of another sequence, a gap or a repetition can be detected from the values.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import types_pb2
from pagewire.v1.worker_pb2 import NewSequence
from wire.columns import unpack
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptOutput

HIDDEN_SIZE = 8


def logprob_of(token_ids: NDArray[np.integer]) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
    """(log probability, rank) of each token: fixed functions of its id."""
    return -(token_ids % 1000 / np.float32(64)).astype(np.float32), token_ids % 50 + 1


def hidden_of(token_ids: NDArray[np.integer], begin: int) -> NDArray[np.float32]:
    """Hidden states [N, HIDDEN_SIZE] of tokens at positions from `begin` on."""
    positions = np.arange(begin, begin + len(token_ids))
    numbers = token_ids[:, None] * np.arange(1, HIDDEN_SIZE + 1) + positions[:, None]
    return (numbers % 97 / np.float32(97)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PromptOutputRequest:
    """The prompt outputs that the sequence in a slot requests."""

    slot: int
    token_ids: NDArray[np.integer]  # of the prompt
    begin: int  # no outputs are due before this position
    end: int
    num_top: int | None  # None: hidden states
    vocab_size: int

    @classmethod
    def of(cls, new: NewSequence, vocab_size: int) -> "PromptOutputRequest | None":
        """The prompt outputs of a new sequence; None if it requests none."""
        token_ids = unpack(new.token_ids, name="token_ids")[: new.num_prompt_tokens]
        num_top = None
        if new.sampling.HasField("prompt_logprobs"):
            num_top = new.sampling.prompt_logprobs
        elif new.sampling.pooling == types_pb2.POOLING_UNSPECIFIED:
            return None
        end = len(token_ids) - (num_top is not None)
        return cls(new.slot, token_ids, new.prompt_output_begin, end, num_top, vocab_size)

    def answer(self, computed: int, after: int) -> PromptOutput | None:
        """The outputs of a row that computes positions `computed` to `after`; None if none due."""
        begin, end = max(self.begin, computed), min(self.end, after)
        if begin >= end:
            return None
        if self.num_top is None:
            hidden_sum = hidden_of(self.token_ids[begin:end], begin).sum(0)
            return PromptOutput(self.slot, begin, end, hidden_sum=hidden_sum)
        behind = self.token_ids[begin + 1 : end + 1]
        top_ids = (behind[:, None] + np.arange(self.num_top)) % self.vocab_size
        logprobs, ranks = logprob_of(behind)
        columns = LogprobColumns(
            np.arange(len(behind)), logprobs, ranks, top_ids, logprob_of(top_ids)[0]
        )
        return PromptOutput(self.slot, begin, end, logprobs=columns)
