"""Logits processors per request, prepared once and combined for the rows of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.transfer import download, upload
from worker_svc.protocol.step import IntColumn, RowSampling
from worker_svc.sampling.grammars import GrammarPlace, GrammarRows, Grammars
from worker_svc.sampling.logits_processors import Adjustments, BadWords, Entries, History, Penalties

# Pads prefixes of bad words in front; no token has this id.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Rules:
    """Logits processors of one sequence, in addition to temperature and filters."""

    sampling: RowSampling
    stop_token_ids: IntColumn
    allowed_token_ids: IntColumn
    bias_ids: IntColumn
    biases: NDArray[np.float32]
    place: GrammarPlace | None = None  # position in its grammar, if it has one

    @classmethod
    def of(cls, sampling: RowSampling, place: GrammarPlace | None = None) -> "Rules":
        """Prepares the logits processors of a request: tuples become columns."""
        return cls(
            sampling=sampling,
            stop_token_ids=np.array(sampling.stop_token_ids, dtype=np.int64),
            allowed_token_ids=np.array(sampling.allowed_token_ids, dtype=np.int64),
            bias_ids=np.array([i for i, _ in sampling.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
            place=place,
        )


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The rows of a step that have logits processors, as columns [N]."""

    rows: IntColumn  # indices into the step's sampling rows
    rules: Sequence[Rules]
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


def collect(ruled: RuledRows, token_rows: Tensor, grammars: Grammars) -> Adjustments:
    """Combines the logits processors of all rows; starts to fill the grammars' masks."""
    rules, nothing = ruled.rules, np.zeros(0, dtype=np.int64)
    stops = [
        r.stop_token_ids if is_short else nothing
        for r, is_short in zip(rules, ruled.is_short, strict=True)
    ]
    return Adjustments(
        allowed=_entries(ruled.rows, [r.allowed_token_ids for r in rules]),
        bad_words=_bad_words(ruled, token_rows),
        masked=_entries(ruled.rows, stops),
        biased=_entries(ruled.rows, [r.bias_ids for r in rules]),
        biases=np.concatenate([r.biases for r in rules]),
        penalties=_penalties(ruled, token_rows),
        grammars=_grammars(ruled, token_rows, grammars),
        rows=ruled.rows,
    )


def _entries(rows: IntColumn, ids: list[IntColumn]) -> Entries:
    return Entries(np.repeat(rows, [len(column) for column in ids]), np.concatenate(ids))


def _bad_words(ruled: RuledRows, token_rows: Tensor) -> BadWords | None:
    words = [
        (index, word)
        for index, rules in enumerate(ruled.rules)
        for word in rules.sampling.bad_words_token_ids
    ]
    if not words:
        return None
    width = max(len(word) for _, word in words) - 1
    prefixes = np.full((len(words), width), NO_TOKEN, dtype=np.int64)
    for line, (_, word) in zip(prefixes, words, strict=True):
        line[width - len(word) + 1 :] = word[:-1]
    which = [index for index, _ in words]
    return BadWords(
        rows=ruled.rows[which],
        prefixes=prefixes,
        last_ids=np.array([word[-1] for _, word in words], dtype=np.int64),
        history=ruled.history(which, token_rows),
    )


def _penalties(ruled: RuledRows, token_rows: Tensor) -> Penalties | None:
    which = [i for i, rules in enumerate(ruled.rules) if rules.sampling.has_penalties]
    if not which:
        return None
    samplings = [ruled.rules[i].sampling for i in which]
    return Penalties(
        rows=ruled.rows[which],
        presence=np.array([s.presence_penalty for s in samplings], dtype=np.float32),
        frequency=np.array([s.frequency_penalty for s in samplings], dtype=np.float32),
        repetition=np.array([s.repetition_penalty for s in samplings], dtype=np.float32),
        history=ruled.history(which, token_rows),
    )


def _grammars(ruled: RuledRows, token_rows: Tensor, grammars: Grammars) -> GrammarRows | None:
    placed = [(i, rules.place) for i, rules in enumerate(ruled.rules) if rules.place is not None]
    if not placed:
        return None
    which = np.array([index for index, _ in placed], dtype=np.int64)
    places = [place for _, place in placed]
    grammars.settle()
    ends = ruled.num_tokens[which]
    num_output = ends - ruled.num_prompt[which]
    num_unread = num_output - np.array([place.num_read for place in places], dtype=np.int64)
    # Usually the token of the previous step alone; none if that step failed.
    behind = np.arange(num_unread.sum()) - np.repeat(np.cumsum(num_unread), num_unread)
    index = np.repeat(ruled.slots[which] * token_rows.shape[1] + ends, num_unread) + behind
    (positions,) = upload(token_rows.device, index)
    tokens = token_rows.view(-1)[positions]
    return GrammarRows(ruled.rows[which], grammars.fill(places, num_unread, download(tokens)))
