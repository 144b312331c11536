"""Samples what a step's rows ask for on CUDA, kernel by kernel, when a graph does not.

Rows with logits processors, log probabilities or drafts: the logits come from anywhere. Launches
only; nothing here waits for the device.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.transfer import fetched, upload, upload_array
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.model_runner import NO_CHOICE, Drawn
from worker_svc.runner.step_map import spread
from worker_svc.sampling import logprobs
from worker_svc.sampling.logits_processors import LogitsProcessors
from worker_svc.sampling.logprobs import Logprobs
from worker_svc.sampling.sampler import SamplingRows, process_and_check


@dataclass(frozen=True, slots=True)
class SampleExtras:
    """Outputs of a step in addition to the ring's tokens; the default if no row asks for any.

    Tensors are on the host, and valid once the step is done.
    """

    logprobs: Logprobs | None = None
    has_choice: Tensor | None = None  # [N] bool, as of `Checked`: of adjusted rows
    logits_processors: LogitsProcessors = field(default_factory=LogitsProcessors)
    token_ids: Tensor | None = None  # [R] int32, in the ring's place if the step has drafts

    def drawn(self, tokens: NDArray[np.int32]) -> Drawn:
        """The tokens [R] of the finished step together with these."""
        if self.has_choice is not None:
            tokens[self.logits_processors.rows[~self.has_choice.numpy()]] = NO_CHOICE
        columns = None if self.logprobs is None else self.logprobs.to_host()
        return Drawn(tokens, columns, self.logits_processors.problems())


def sample_rows(
    slots: SlotsOnDevice, part: VocabPart, staged: Staged, sampling: SamplingRows
) -> SampleExtras:
    """Samples after each of a step's R positions, with all that their rows ask for."""
    wanted, processors = sampling.wanted, sampling.logits_processors
    raw = has_choice = None
    if len(wanted) or processors:
        logits = part.whole()  # [R, V]
        raw = logprobs.distributions(logits, wanted.rows) if len(wanted) else None  # [N, V]
        if processors:
            logits = logits.float()
            has_choice = fetched(_adjust(slots, logits, processors))
        part = VocabPart(logits)
    token_ids = _draw(slots, part, staged, bool(sampling.is_filtered.any()))
    found = None
    if raw is not None:
        known = _written(slots, staged) if token_ids is None else token_ids.clamp(min=0).long()
        found = logprobs.look_up(raw, wanted, known).fetched()
    there = None if token_ids is None else fetched(token_ids)
    return SampleExtras(found, has_choice, processors, there)


def _draw(slots: SlotsOnDevice, part: VocabPart, staged: Staged, filters: bool) -> Tensor | None:
    """Samples as a step of the ring; with drafts into no slot, and returns the tokens [R]."""
    rows = staged.rows
    if rows.drafts is None:
        slots.sample(part, rows.slots[rows.samples], filters)
        return None
    each = spread(rows)
    return slots.sample_at(part, each.slots[each.samples], each.known_ends[each.samples], filters)


def _adjust(slots: SlotsOnDevice, logits: Tensor, processors: LogitsProcessors) -> Tensor:
    """Changes logits [R, V] float32 for the kernels; returns `has_choice` of changed rows."""
    rows = upload_array(slots.device, processors.rows)
    checked = process_and_check(logits, processors, rows, slots.penalize)
    assert checked.has_choice is not None
    # A masked token weighs nothing; for the kernel, only a row that failed is not finite.
    changed = logits.index_select(0, rows).clamp_(min=torch.finfo(torch.float32).min)
    logits.index_copy_(0, rows, changed.masked_fill_(~checked.is_good[:, None], float("nan")))
    return checked.has_choice


def _written(slots: SlotsOnDevice, staged: Staged) -> Tensor:
    """The tokens [R] that the step's rows have sampled, from where they were written."""
    where: IntColumn = staged.rows.slots[staged.rows.samples]
    ends = staged.table.columns["num_tokens"][where]
    (index,) = upload(slots.device, where * slots.token_rows.shape[1] + ends)
    return slots.token_rows.view(-1).index_select(0, index).long()
