"""Prompt outputs, computed from the hidden states of the steps that compute the prompt.

Log probabilities of the prompt's tokens, or hidden states to be pooled. The logits of a long prompt
are never all in memory: they are computed and used some rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wire.logprobs import LogprobColumns, join
from wire.prompt_outputs import PromptReport
from worker_svc.sampling.logprobs import Logprobs, look_up

ToLogits = Callable[[Tensor], Tensor]  # [R, hidden] -> float32 [R, V]
Pieces = Sequence[Tensor]

MAX_LOGITS_BYTES = 64 << 20  # of float32 logits at a time; their temporaries are as large


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of a prompt that a step computes and that have outputs due."""

    slot: int
    begin: int
    end: int
    first_row: int  # row of position `begin` in the step's hidden states
    num_top: int | None  # alternatives per token; None: hidden states


@dataclass(frozen=True, slots=True)
class Found:
    """Prompt outputs of a part, on the device."""

    part: Part
    is_finite: Tensor  # bool
    logprobs: tuple[Logprobs, ...] = ()  # of the tokens after its positions, in pieces
    hidden_sum: Tensor | None = None  # [hidden] float32

    def to_host(self) -> PromptReport:
        """The report for the wire."""
        slot, begin, end = self.part.slot, self.part.begin, self.part.end
        if not bool(self.is_finite):
            return PromptReport(slot, begin, end, is_finite=False)
        if self.hidden_sum is not None:
            return PromptReport(slot, begin, end, hidden_sum=self.hidden_sum.cpu().numpy())
        return PromptReport(slot, begin, end, logprobs=self._columns())

    def _columns(self) -> LogprobColumns | None:
        return join((len(some.rows), some.to_host()) for some in self.logprobs)


def find_out(
    parts: list[Part], hidden: Tensor, token_rows: Tensor, to_logits: ToLogits, vocab_size: int
) -> list[Found]:
    """The prompt outputs of these parts, from the hidden states [T, hidden] of a step."""
    num_rows = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    found = []
    for part in parts:
        states = hidden[part.first_row : part.first_row + part.end - part.begin]  # [N, hidden]
        if part.num_top is None:
            found.append(_pool(part, states))
            continue
        # A position's hidden state gives the log probability of the next token.
        behind = token_rows[part.slot, part.begin + 1 : part.end + 1].long()  # [N]
        found.append(
            _score(part, torch.split(states, num_rows), torch.split(behind, num_rows), to_logits)
        )
    return found


def _pool(part: Part, states: Tensor) -> Found:
    hidden_sum = states.float().sum(0)
    return Found(part, hidden_sum.isfinite().all(), hidden_sum=hidden_sum)


def _score(part: Part, states: Pieces, token_ids: Pieces, to_logits: ToLogits) -> Found:
    assert part.num_top is not None
    logprobs, is_finite = [], []
    for some, targets in zip(states, token_ids, strict=True):
        logits = to_logits(some)  # [n, V] float32
        is_finite.append(logits.sum(-1).isfinite().all())
        everyone = np.arange(len(some))
        logprobs.append(look_up(logits.log_softmax(-1), everyone, targets, part.num_top))
    return Found(part, torch.stack(is_finite).all(), tuple(logprobs))
