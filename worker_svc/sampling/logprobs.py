"""Log probabilities of sampled tokens before temperature, filters and logits processors.

Natural logarithms in float32 of the unmodified logits, computed only for rows that request them.
With each sampled token go the likeliest ones, or those that the request names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from wire.logprobs import LogprobColumns
from worker_svc.device.transfer import fetched, upload_array
from worker_svc.protocol.step import IntColumn, RowSampling, no_entries

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """The logprobs asked for by N rows of a step, on the host."""

    rows: IntColumn  # [N]
    num_top: int = 0  # likeliest tokens per row; rows that asked for fewer use the first of them
    named: IntColumn | None = None  # [N, W], NO_TOKEN after those of a row; None: no row has any

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def nothing(cls) -> "Wanted":
        return cls(no_entries())

    @classmethod
    def of(cls, rows: IntColumn, samplings: Sequence[RowSampling]) -> "Wanted":
        """The wishes of each of these rows, `samplings` one by one."""
        likeliest = (one.num_top_logprobs or 0 for one in samplings if not one.logprob_token_ids)
        num_top = max(likeliest, default=0)
        width = max((len(one.logprob_token_ids) for one in samplings), default=0)
        if not width:
            return cls(rows, num_top)
        named = np.full((len(rows), width), NO_TOKEN, dtype=np.int64)
        for row, one in zip(named, samplings, strict=True):
            row[: len(one.logprob_token_ids)] = one.logprob_token_ids
        return cls(rows, num_top, named)


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


def distributions(logits: Tensor, rows: Tensor) -> Tensor:
    """Log probabilities [N, V] of some rows of logits [R, V]; a copy."""
    return logits.index_select(0, rows).float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The facts of N rows before a token is sampled, on the device."""

    ids: Tensor  # [N, K] int64: the likeliest, or those that the row names
    logprobs: Tensor  # [N, K] float32


def likeliest(logprobs: Tensor, wanted: Wanted) -> Likeliest:
    """The likeliest tokens of each row, or those it names, from logprobs [N, V]."""
    top = logprobs.topk(min(wanted.num_top, logprobs.shape[1]), dim=-1)
    if wanted.named is None:
        return Likeliest(top.indices, top.values)
    return Likeliest(*_replaced(top.indices, top.values, logprobs, wanted.named))


def look_up(logprobs: Tensor, wanted: Wanted, token_ids: Tensor, top: Likeliest) -> Logprobs:
    """Log probabilities and ranks of sampled tokens, from logprobs [N, V] and token_ids [N]."""
    sampled = logprobs.gather(1, token_ids[:, None])  # [N, 1]
    ranks = (logprobs >= sampled).sum(-1)
    return Logprobs(np.asarray(wanted.rows), sampled.squeeze(1), ranks, top.ids, top.logprobs)


def _replaced(
    top_ids: Tensor, top: Tensor, logprobs: Tensor, named: IntColumn
) -> tuple[Tensor, Tensor]:
    """Ids and values [N, max(K, W)]: in rows with named tokens these, in others the likeliest."""
    named_ids = upload_array(logprobs.device, named)  # [N, W]
    num_top, num_named = top_ids.shape[1], named_ids.shape[1]
    has_named = named_ids[:, :1] != NO_TOKEN  # [N, 1]
    named_ids = named_ids.clamp(min=0)
    named_values = logprobs.gather(1, named_ids)
    fill, rest = (0, max(num_named - num_top, 0)), (0, max(num_top - num_named, 0))
    return (
        torch.where(has_named, pad(named_ids, rest), pad(top_ids, fill)),
        torch.where(has_named, pad(named_values, rest), pad(top, fill)),
    )
