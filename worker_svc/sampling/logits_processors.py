"""Logits processors: grammars, allowed ids, bad words, minimum tokens, biases, penalties.

Applied in this order before sampling, to the rows that request them. A sequence's tokens are read
from its token row on the device, so penalties need no counters that a preemption or a restart could
lose. Stateless and independent of requests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.transfer import upload_array
from worker_svc.protocol.step import IntColumn, no_entries
from worker_svc.sampling.grammars import GrammarRows

# Limits memory: each of these rows needs counts over the whole vocabulary.
ROWS_AT_ONCE = 32


def _no_floats() -> NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits, by row and token id."""

    rows: IntColumn = field(default_factory=no_entries)
    ids: IntColumn = field(default_factory=no_entries)

    def __len__(self) -> int:
        return len(self.rows)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices (rows, token ids) into logits on the device."""
        return upload_array(device, self.rows), upload_array(device, self.ids)


@dataclass(frozen=True, slots=True)
class History:
    """Tokens of rows so far: columns [N], and the token rows on the device."""

    token_rows: Tensor  # [max_num_seqs, L], by slot
    slots: IntColumn
    num_prompt: IntColumn
    num_tokens: IntColumn

    def part(self, start: int, end: int) -> "History":
        """The rows from start to end."""
        columns = (self.slots, self.num_prompt, self.num_tokens)
        return History(self.token_rows, *(column[start:end] for column in columns))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words: token sequences, with the last token masked after the others; one entry each."""

    rows: IntColumn  # [N], into the logits
    prefixes: IntColumn  # [N, P]: all but the last token, padded with -1 in front
    last_ids: IntColumn  # [N]
    history: History  # [N]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the rows that request any."""

    rows: IntColumn  # [N]
    presence: NDArray[np.float32]  # [N], 0 is off
    frequency: NDArray[np.float32]  # [N], 0 is off
    repetition: NDArray[np.float32]  # [N], 1 is off
    history: History  # [N]

    def parts(self) -> "Iterator[Penalties]":
        """The same rows, so many at once as memory is meant for."""
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            end = start + ROWS_AT_ONCE
            yield Penalties(
                self.rows[start:end],
                self.presence[start:end],
                self.frequency[start:end],
                self.repetition[start:end],
                self.history.part(start, end),
            )


# Applies penalties to logits [R, V] float32 in place.
Penalize = Callable[[Tensor, Penalties], None]


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """Logits processors for the rows of a step; empty fields and None have no effect."""

    allowed: Entries = field(default_factory=Entries)  # the only allowed tokens of their rows
    bad_words: BadWords | None = None
    masked: Entries = field(default_factory=Entries)  # forbidden until min_tokens
    biased: Entries = field(default_factory=Entries)
    biases: NDArray[np.float32] = field(default_factory=_no_floats)  # one per entry of `biased`
    penalties: Penalties | None = None
    grammars: GrammarRows | None = None  # masks of rows with a grammar
    rows: IntColumn = field(default_factory=no_entries)  # the rows that a field above may change

    def __bool__(self) -> bool:
        return bool(
            len(self.allowed)
            or len(self.masked)
            or len(self.biased)
            or self.bad_words is not None
            or self.penalties is not None
            or self.grammars is not None
        )

    def moved(self, places: IntColumn) -> "LogitsProcessors":
        """The same for logits in another order: those of row r are at `places[r]`."""

        def entries(old: Entries) -> Entries:
            return Entries(places[old.rows], old.ids)

        words, penalties, grammars = self.bad_words, self.penalties, self.grammars
        return replace(
            self,
            allowed=entries(self.allowed),
            bad_words=None if words is None else replace(words, rows=places[words.rows]),
            masked=entries(self.masked),
            biased=entries(self.biased),
            penalties=penalties and replace(penalties, rows=places[penalties.rows]),
            grammars=grammars and replace(grammars, rows=places[grammars.rows]),
            rows=places[self.rows],
        )

    def problems(self) -> dict[int, str]:
        """Returns the reason for each row that has no allowed token; only grammars give one."""
        return {} if self.grammars is None else self.grammars.problems()


def process_logits(
    logits: Tensor, logits_processors: LogitsProcessors, penalize: Penalize | None = None
) -> None:
    """Applies all logits processors to logits [R, V] in place; penalties as told, or by torch."""
    if logits_processors.grammars is not None:
        _keep_grammatical(logits, logits_processors.grammars)
    if len(logits_processors.allowed):
        _keep_allowed(logits, logits_processors.allowed)
    if logits_processors.bad_words is not None:
        _mask_bad_words(logits, logits_processors.bad_words)
    if len(logits_processors.masked):
        logits[logits_processors.masked.on(logits.device)] = float("-inf")
    if len(logits_processors.biased):
        biases = upload_array(logits.device, logits_processors.biases)
        logits.index_put_(logits_processors.biased.on(logits.device), biases, accumulate=True)
    if logits_processors.penalties is not None:
        (penalize or penalize_by_torch)(logits, logits_processors.penalties)


def _keep_grammatical(logits: Tensor, grammars: GrammarRows) -> None:
    rows = upload_array(logits.device, grammars.rows)
    packed = grammars.on(logits.device).view(torch.uint8)  # [G, bytes]
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = (bits & 1).view(len(rows), -1)[:, : logits.shape[1]] == 0  # [G, V]
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def _keep_allowed(logits: Tensor, allowed: Entries) -> None:
    entries = allowed.on(logits.device)
    kept = logits[entries]
    logits[upload_array(logits.device, np.unique(allowed.rows))] = float("-inf")
    logits[entries] = kept


def _mask_bad_words(logits: Tensor, words: BadWords) -> None:
    device = logits.device
    history, (num_words, width) = words.history, words.prefixes.shape
    # The newest `width` tokens of each row; positions before the output match nothing.
    positions = history.num_tokens[:, None] + np.arange(-width, 0)  # [N, P]
    is_output = upload_array(device, positions >= history.num_prompt[:, None])
    slots = upload_array(device, history.slots)
    said = history.token_rows[slots[:, None], upload_array(device, positions.clip(0))]
    prefixes = upload_array(device, words.prefixes)  # [N, P]
    follows = ((said == prefixes) & is_output | (prefixes < 0)).all(-1)  # [N]
    change = torch.zeros(num_words, device=device).masked_fill_(follows, float("-inf"))
    # Summed, because several words of a row may end in the same token.
    index = Entries(words.rows, words.last_ids).on(device)
    logits.index_put_(index, change, accumulate=True)


def penalize_by_torch(logits: Tensor, penalties: Penalties) -> None:
    """Applies penalties in place; changes only the logits of tokens in the row's sequence."""
    for part in penalties.parts():
        rows, presence, frequency, repetition = (
            upload_array(logits.device, column)[:, None]
            for column in (part.rows, part.presence, part.frequency, part.repetition)
        )
        said, count = _said(part.history, logits)  # [N, L]
        chosen = logits[rows, said]
        chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen -= frequency * count
        chosen -= presence * (count > 0)
        # A repeated token is written several times with the same value.
        logits[rows, said] = chosen


def _said(history: History, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens of prompt and output [N, L], count of each token in the output [N, L])."""
    device = logits.device
    slots, num_prompt, num_tokens = (
        upload_array(device, column)[:, None]
        for column in (history.slots, history.num_prompt, history.num_tokens)
    )
    width = int(history.num_tokens.max())
    said = history.token_rows[:, :width].index_select(0, slots.squeeze(1)).long()  # [N, L]
    position = torch.arange(width, device=device)
    # Values after the known tokens are arbitrary; they are replaced by the first token.
    said = torch.where(position < num_tokens, said, said[:, :1])
    is_output = (position >= num_prompt) & (position < num_tokens)
    counts = torch.zeros((len(said), logits.shape[1]), device=device)
    # Integers below 2**24, so float32 sums are exact in any order.
    counts.scatter_add_(1, said, is_output.float())
    return said, counts.gather(1, said)
