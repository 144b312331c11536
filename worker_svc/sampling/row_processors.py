"""Logits processors per request, prepared once and combined for the rows of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.transfer import download, upload
from worker_svc.protocol.step import IntColumn, RowSampling
from worker_svc.sampling.grammars import GrammarRows, Grammars, Read
from worker_svc.sampling.logits_processors import (
    BadWords,
    Entries,
    History,
    LogitsProcessors,
    Penalties,
)
from worker_svc.sampling.mask_filling import GrammarPlace

# Pads prefixes of bad words in front; no token has this id.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RowProcessors:
    """Logits processors of one sequence, in addition to temperature and filters."""

    sampling: RowSampling
    stop_token_ids: IntColumn
    allowed_token_ids: IntColumn
    bias_ids: IntColumn
    biases: NDArray[np.float32]
    place: GrammarPlace | None = None  # position in its grammar, if it has one

    @classmethod
    def of(cls, sampling: RowSampling, place: GrammarPlace | None = None) -> "RowProcessors":
        """Prepares the logits processors of a request: tuples become columns."""
        if place is not None:
            place.draws_from_all = not sampling.filters
        return cls(
            sampling=sampling,
            stop_token_ids=np.array(sampling.stop_token_ids, dtype=np.int64),
            allowed_token_ids=np.array(sampling.allowed_token_ids, dtype=np.int64),
            bias_ids=np.array([i for i, _ in sampling.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
            place=place,
        )


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The rows of a step that have logits processors, as columns [N]."""

    rows: IntColumn  # indices into the step's sampling rows
    processors: Sequence[RowProcessors]
    is_short: NDArray[np.bool_]  # fewer output tokens than min_tokens
    slots: IntColumn
    num_prompt: IntColumn
    num_tokens: IntColumn

    def history(self, which: Sequence[int], token_rows: Tensor) -> History:
        """The token history of the given rows; a row may occur more than once."""
        index = np.array(which, dtype=np.int64)
        return History(
            token_rows, self.slots[index], self.num_prompt[index], self.num_tokens[index]
        )


class SampledLast(Protocol):
    """The tokens of a step that was launched before."""

    def known(self, slots: IntColumn) -> Read | None:
        """Reads the tokens of these slots; None: not each of them has one."""


def collect(
    processed: ProcessedRows,
    token_rows: Tensor,
    grammars: Grammars,
    sampled_last: SampledLast | None = None,
) -> LogitsProcessors:
    """Combines the logits processors of all rows; starts to fill the grammars' masks."""
    processors, nothing = processed.processors, np.zeros(0, dtype=np.int64)
    stops = [
        r.stop_token_ids if is_short else nothing
        for r, is_short in zip(processors, processed.is_short, strict=True)
    ]
    return LogitsProcessors(
        allowed=_entries(processed.rows, [r.allowed_token_ids for r in processors]),
        bad_words=_bad_words(processed, token_rows),
        masked=_entries(processed.rows, stops),
        biased=_entries(processed.rows, [r.bias_ids for r in processors]),
        biases=np.concatenate([r.biases for r in processors]),
        penalties=_penalties(processed, token_rows),
        grammars=_grammars(processed, token_rows, grammars, sampled_last),
        rows=processed.rows,
    )


def _entries(rows: IntColumn, ids: list[IntColumn]) -> Entries:
    return Entries(np.repeat(rows, [len(column) for column in ids]), np.concatenate(ids))


def _bad_words(processed: ProcessedRows, token_rows: Tensor) -> BadWords | None:
    words = [
        (index, word)
        for index, processors in enumerate(processed.processors)
        for word in processors.sampling.bad_words_token_ids
    ]
    if not words:
        return None
    width = max(len(word) for _, word in words) - 1
    prefixes = np.full((len(words), width), NO_TOKEN, dtype=np.int64)
    for line, (_, word) in zip(prefixes, words, strict=True):
        line[width - len(word) + 1 :] = word[:-1]
    which = [index for index, _ in words]
    return BadWords(
        rows=processed.rows[which],
        prefixes=prefixes,
        last_ids=np.array([word[-1] for _, word in words], dtype=np.int64),
        history=processed.history(which, token_rows),
    )


def _penalties(processed: ProcessedRows, token_rows: Tensor) -> Penalties | None:
    which = [
        i for i, processors in enumerate(processed.processors) if processors.sampling.has_penalties
    ]
    if not which:
        return None
    samplings = [processed.processors[i].sampling for i in which]
    return Penalties(
        rows=processed.rows[which],
        presence=np.array([s.presence_penalty for s in samplings], dtype=np.float32),
        frequency=np.array([s.frequency_penalty for s in samplings], dtype=np.float32),
        repetition=np.array([s.repetition_penalty for s in samplings], dtype=np.float32),
        history=processed.history(which, token_rows),
    )


def _grammars(
    processed: ProcessedRows,
    token_rows: Tensor,
    grammars: Grammars,
    sampled_last: SampledLast | None,
) -> GrammarRows | None:
    placed = [
        (i, processors.place)
        for i, processors in enumerate(processed.processors)
        if processors.place is not None
    ]
    if not placed:
        return None
    which = np.array([index for index, _ in placed], dtype=np.int64)
    places = [place for _, place in placed]
    ends = processed.num_tokens[which]
    num_output = ends - processed.num_prompt[which]
    num_unread = num_output - np.array([place.num_read for place in places], dtype=np.int64)
    slots, read = processed.slots[which], None
    if sampled_last is not None and (num_unread == 1).all():
        read = sampled_last.known(slots)
    if read is None:
        read = _downloaded(token_rows, slots, ends, num_unread)
    return grammars.fill(processed.rows[which], places, num_unread, read)


def _downloaded(token_rows: Tensor, slots: IntColumn, ends: IntColumn, counts: IntColumn) -> Read:
    """Reads the last tokens, so many of each slot; none of one whose step failed."""
    behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts), counts)
    index = np.repeat(slots * token_rows.shape[1] + ends, counts) + behind
    (positions,) = upload(token_rows.device, index)
    return download(token_rows.view(-1)[positions])
