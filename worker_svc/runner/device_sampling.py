"""Samples what a step's rows ask for on CUDA, kernel by kernel, when a graph does not.

Rows with logits processors, log probabilities or drafts: the logits come from anywhere. Launches
only; nothing here waits for the device.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.restrict_rows import restrict_rows
from worker_svc.device.transfer import fetched, upload
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn, no_entries
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.step_map import spread
from worker_svc.runner.model_runner import NO_CHOICE, Drawn
from worker_svc.sampling import logprobs
from worker_svc.sampling.logits_processors import LogitsProcessors, process_logits
from worker_svc.sampling.logprobs import Logprobs
from worker_svc.sampling.sampler import SamplingRows


@dataclass(frozen=True, slots=True)
class SampleExtras:
    """Outputs of a step in addition to the ring's tokens; the default if no row asks for any.

    Tensors are on the host, and valid once the step is done.
    """

    logprobs: Logprobs | None = None
    has_choice: Tensor | None = None  # [N], as of `Checked`: of adjusted rows
    logits_processors: LogitsProcessors = field(default_factory=LogitsProcessors)
    token_ids: Tensor | None = None  # [R] int32, in the ring's place if the step has drafts
    choice_places: IntColumn | None = None  # of adjusted rows in `has_choice`; None: it is theirs

    def drawn(self, tokens: NDArray[np.int32]) -> Drawn:
        """The tokens [R] of the finished step together with these."""
        if self.has_choice is not None:
            has_choice = self.has_choice.numpy().astype(np.bool_)
            if self.choice_places is not None:
                has_choice = has_choice[self.choice_places]
            tokens[self.logits_processors.rows[~has_choice]] = NO_CHOICE
        columns = None if self.logprobs is None else self.logprobs.to_host()
        return Drawn(tokens, columns, self.logits_processors.problems())


@dataclass(frozen=True, slots=True)
class PlacedLogits:
    """Logits for a step's R positions, in an order of their own."""

    part: VocabPart  # [S, N]
    places: IntColumn  # [R]: each position's row of them
    slots: Tensor  # [S] int32: which slot each row samples for; -1: none

    def ordered(self) -> VocabPart:
        """The logits [R, N] in the order of the positions."""
        (places,) = upload(self.slots.device, self.places)
        part = self.part
        return VocabPart(part.logits.index_select(0, places), part.first_token, part.group)


def sample_rows(
    slots: SlotsOnDevice, given: VocabPart | PlacedLogits, staged: Staged, sampling: SamplingRows
) -> SampleExtras:
    """Samples after each of a step's R positions, with all that their rows ask for.

    What grammars allow may still be computed on the host. The device waits for it, after all work
    that does not need it.
    """
    placed = given if isinstance(given, PlacedLogits) else None
    part = given.part if isinstance(given, PlacedLogits) else given
    wanted, processors = sampling.wanted, sampling.logits_processors
    raw = top = has_choice = None
    index = _upload(slots, staged, sampling, placed)
    if len(wanted) or processors:
        logits = part.whole()  # [S, V]
        if len(wanted):
            raw = logprobs.distributions(logits, index.wanted)  # [N, V]
            top = logprobs.likeliest(raw, wanted)
        if processors:
            logits = logits.float()
            placed_processors = processors if placed is None else processors.moved(placed.places)
            has_choice = fetched(_adjust(slots, logits, placed_processors, index))
        part = VocabPart(logits)
    token_ids = _draw(slots, part, staged, placed, bool(sampling.is_filtered.any()))
    found = None
    if raw is not None and top is not None:
        if token_ids is None:
            known = slots.token_rows.view(-1).index_select(0, index.written)
        else:
            known = token_ids.index_select(0, index.wanted).clamp(min=0)
        found = logprobs.look_up(raw, wanted, known.long(), top).fetched()
    there = None if token_ids is None else fetched(token_ids)
    return SampleExtras(found, has_choice, processors, there)


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a step's rows that launches read, on the device."""

    wanted: Tensor  # rows of logits whose log probabilities are asked for
    written: Tensor  # where in the token rows the tokens of these will be
    processed: Tensor  # [N]: rows of logits that change
    masks: Tensor  # [N]: the line of the grammars' masks of each of these; -1: none


def _upload(
    slots: SlotsOnDevice, staged: Staged, sampling: SamplingRows, placed: PlacedLogits | None
) -> _Index:
    """All in one copy."""
    processors, rows, asking = sampling.logits_processors, staged.rows, sampling.wanted.rows
    written = no_entries()
    if rows.drafts is None:
        written = slots.next_places(staged, asking)
    masks = np.full(len(processors.rows), -1, dtype=np.int64)
    if processors.grammars is not None:
        with_grammar = processors.grammars.rows
        masks[np.searchsorted(processors.rows, with_grammar)] = np.arange(len(with_grammar))
    wanted, processed = asking, processors.rows
    if placed is not None:
        wanted, processed = placed.places[asking], placed.places[processed]
    return _Index(*upload(slots.device, wanted, written, processed, masks))


def _draw(
    slots: SlotsOnDevice,
    part: VocabPart,
    staged: Staged,
    placed: PlacedLogits | None,
    filters: bool,
) -> Tensor | None:
    """Samples as a step of the ring; with drafts into no slot, and returns the tokens [R]."""
    rows = staged.rows
    if placed is not None:
        slots.sample(part, placed.slots, filters)
        return None
    if rows.drafts is None:
        (column,) = upload(slots.device, rows.slots[rows.samples])
        slots.sample(part, column.int(), filters)
        return None
    each = spread(rows)
    return slots.sample_at(part, each.slots[each.samples], each.known_ends[each.samples], filters)


def _adjust(
    slots: SlotsOnDevice, logits: Tensor, processors: LogitsProcessors, index: _Index
) -> Tensor:
    """Changes logits [S, V] float32 for the kernels; returns `has_choice` of changed rows."""
    # A sum is finite only if every term is.
    was_finite = logits.index_select(0, index.processed).sum(-1).isfinite()
    # A token that one of them forbids stays forbidden, so grammars may come after all others.
    process_logits(logits, replace(processors, grammars=None), slots.penalize)
    masks = slots.no_masks
    if processors.grammars is not None:
        masks = processors.grammars.on(slots.device)
    return restrict_rows(logits, index.processed, index.masks, was_finite, masks)
