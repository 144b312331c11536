"""Prompt outputs: prompt log probabilities and pooled hidden states.

Computed from the hidden states of the steps that prefill the prompt. The logits of a long prompt
are computed and reduced in pieces, and never all in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wire.logprobs import LogprobColumns, join
from wire.prompt_outputs import PromptOutput
from worker_svc.sampling.logprobs import Logprobs, Wanted, likeliest, look_up

ToLogits = Callable[[Tensor], Tensor]  # [R, hidden] -> float32 [R, V]
Pieces = Sequence[Tensor]

MAX_LOGITS_BYTES = 64 << 20  # of float32 logits per piece; temporaries add as much


@dataclass(frozen=True, slots=True)
class Part:
    """The prompt positions of one sequence with outputs due in this step."""

    slot: int
    begin: int
    end: int
    first_row: int  # of position `begin`, in the step's hidden states
    num_top: int | None  # top log probabilities per token; None: pooling


@dataclass(frozen=True, slots=True)
class DevicePromptOutput:
    """Prompt outputs of one part, on the device."""

    part: Part
    is_finite: Tensor  # bool scalar
    logprobs: tuple[Logprobs, ...] = ()  # of each position's next token, in pieces
    hidden_sum: Tensor | None = None  # [hidden] float32

    def to_host(self) -> PromptOutput:
        """Copies the outputs to the host as a report for the wire."""
        slot, begin, end = self.part.slot, self.part.begin, self.part.end
        if not bool(self.is_finite):
            return PromptOutput(slot, begin, end, is_finite=False)
        if self.hidden_sum is not None:
            return PromptOutput(slot, begin, end, hidden_sum=self.hidden_sum.cpu().numpy())
        return PromptOutput(slot, begin, end, logprobs=self._columns())

    def _columns(self) -> LogprobColumns | None:
        return join((len(some.rows), some.to_host()) for some in self.logprobs)


def compute_prompt_outputs(
    parts: list[Part], hidden: Tensor, token_rows: Tensor, to_logits: ToLogits, vocab_size: int
) -> list[DevicePromptOutput]:
    """Computes the outputs of all parts from the step's hidden states [T, hidden]."""
    num_rows = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    found = []
    for part in parts:
        states = hidden[part.first_row : part.first_row + part.end - part.begin]  # [N, hidden]
        if part.num_top is None:
            found.append(_pool(part, states))
            continue
        # The hidden state of a position predicts the next token.
        behind = token_rows[part.slot, part.begin + 1 : part.end + 1].long()  # [N]
        found.append(
            _score(part, torch.split(states, num_rows), torch.split(behind, num_rows), to_logits)
        )
    return found


def _pool(part: Part, states: Tensor) -> DevicePromptOutput:
    hidden_sum = states.float().sum(0)
    return DevicePromptOutput(part, hidden_sum.isfinite().all(), hidden_sum=hidden_sum)


def _score(
    part: Part, states: Pieces, token_ids: Pieces, to_logits: ToLogits
) -> DevicePromptOutput:
    assert part.num_top is not None
    logprobs, is_finite = [], []
    for some, targets in zip(states, token_ids, strict=True):
        logits = to_logits(some)  # [n, V] float32
        is_finite.append(logits.sum(-1).isfinite().all())
        wanted = Wanted(np.arange(len(some)), part.num_top)
        found = logits.log_softmax(-1)
        logprobs.append(look_up(found, wanted, targets, likeliest(found, wanted)))
    return DevicePromptOutput(part, torch.stack(is_finite).all(), tuple(logprobs))
