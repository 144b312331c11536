"""Log probabilities of sampled tokens before temperature, filters and logits processors.

Natural logarithms in float32 of the unmodified logits, computed only for rows that request them.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from wire.logprobs import LogprobColumns
from worker_svc.device.transfer import fetched, upload_array
from worker_svc.protocol.step import IntColumn


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of N rows, on the device."""

    rows: IntColumn  # [N], on the host
    sampled: Tensor  # [N] float32
    ranks: Tensor  # [N] int64
    top_ids: Tensor  # [N, K] int64
    top: Tensor  # [N, K] float32, in descending order

    def fetched(self) -> "Logprobs":
        """The same on the host, once what was launched so far is done."""
        sampled, ranks, top_ids, top = (
            fetched(values) for values in (self.sampled, self.ranks, self.top_ids, self.top)
        )
        return Logprobs(self.rows, sampled, ranks, top_ids, top)

    def to_host(self) -> LogprobColumns:
        """Copies the values to the host as wire columns."""
        return LogprobColumns(
            self.rows,
            self.sampled.cpu().numpy(),
            self.ranks.int().cpu().numpy(),
            self.top_ids.int().cpu().numpy(),
            self.top.cpu().numpy(),
        )


def distributions(logits: Tensor, rows: IntColumn) -> Tensor:
    """Log probabilities [N, V] of some rows of logits [R, V]; a copy."""
    return logits.index_select(0, upload_array(logits.device, rows)).float().log_softmax(-1)


def look_up(logprobs: Tensor, rows: IntColumn, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities and ranks of sampled tokens, from logprobs [N, V] and token_ids [R]."""
    index = upload_array(logprobs.device, rows)
    sampled = logprobs.gather(1, token_ids.index_select(0, index)[:, None])  # [N, 1]
    ranks = (logprobs >= sampled).sum(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return Logprobs(np.asarray(rows), sampled.squeeze(1), ranks, top.indices, top.values)
