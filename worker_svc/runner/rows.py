"""The rows of a step, and which of their drafts came true.

A draft is verified by sampling: every row of a draft samples as it would if the drafts before it
were known tokens, with its own position's noise. The first sample that differs from its draft ends
what is accepted and is the token there, so the tokens are those of steps without drafts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.step import BadStep, IntColumn, StepInput


@dataclass(frozen=True, slots=True)
class RowDrafts:
    """The drafts of a step with B rows."""

    num_drafted: IntColumn  # [B]
    token_ids: IntColumn  # row after row; of drafts made here, 0 until `DraftModel.read`
    num_accepted: IntColumn  # [B]; 0 until the step has sampled, then filled by `verify`
    are_made_here: bool = False  # by this worker's draft model

    @property
    def num_refused(self) -> IntColumn:
        """Drafts [B] that did not come true."""
        return self.num_drafted - self.num_accepted

    def verify(self, samples: NDArray[np.bool_], tokens: NDArray[np.int32]) -> IntColumn:
        """Counts the accepted drafts; returns which of the sampled tokens [R] count, ascending.

        `samples` [B] are the rows that sample: each has a token, and one more for each draft. A
        token below 0 is none, and no draft is equal to it.
        """
        kept, first, first_draft = [], 0, 0
        for row in np.flatnonzero(samples).tolist():
            num_drafted = int(self.num_drafted[row])
            drafts = self.token_ids[first_draft : first_draft + num_drafted]
            came_true = tokens[first : first + num_drafted] == drafts
            num_accepted = num_drafted if came_true.all() else int(came_true.argmin())
            self.num_accepted[row] = num_accepted
            kept.append(np.arange(first, first + num_accepted + 1))
            first, first_draft = first + num_drafted + 1, first_draft + num_drafted
        return np.concatenate(kept)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, in batch order."""

    slots: IntColumn  # [B]
    num_scheduled: IntColumn  # [B], drafts included
    num_computed: IntColumn  # [B], before the step
    samples: NDArray[np.bool_]  # [B]: reaches its last known token, so it samples the next
    drafts: RowDrafts | None = None  # of the rows that verify any

    @property
    def is_decode(self) -> bool:
        """One token each, all sampling: the steady state."""
        return bool((self.num_scheduled == 1).all() and self.samples.all())

    @property
    def known_ends(self) -> IntColumn:
        """The ends of the tokens known before the step, of those that each row [B] computes."""
        ends = self.num_computed + self.num_scheduled
        return ends if self.drafts is None else ends - self.drafts.num_drafted

    @property
    def num_advanced(self) -> IntColumn:
        """Tokens [B] with KV that the step adds; with drafts, once these are verified."""
        if self.drafts is None:
            return self.num_scheduled
        return self.num_scheduled - self.drafts.num_refused

    @property
    def num_sampled(self) -> IntColumn:
        """Tokens [B] that the step makes known; with drafts, once these are verified."""
        num_sampled = self.samples.astype(np.int64)
        return num_sampled if self.drafts is None else num_sampled + self.drafts.num_accepted


def drafts_of(step: StepInput, columns: NDArray[np.void], slots: IntColumn) -> RowDrafts | None:
    """A step's drafts; None if it has none. Raises BadStep where a row cannot verify its own.

    `columns` [B] of SLOT are those of the rows' slots.
    """
    has_drafts = step.num_drafted > 0
    if not has_drafts.any():
        return None
    decodes = columns["num_computed"] + 1 == columns["num_tokens"]
    decodes &= (step.num_scheduled == 1 + step.num_drafted) & ~columns["prompt_only"]
    refuse(has_drafts & ~decodes, "num_drafted", slots, "does not decode")
    has_grammar = has_drafts & columns["has_grammar"]
    refuse(has_grammar, "num_drafted", slots, "has a grammar, which reads no drafts")
    num_drafted, token_ids = step.num_drafted, step.draft_token_ids
    made_here = not len(token_ids)
    if made_here:
        token_ids = np.zeros(int(num_drafted.sum()), dtype=np.int64)
    return RowDrafts(num_drafted, token_ids, np.zeros_like(num_drafted), made_here)


def runs(firsts: IntColumn, counts: IntColumn) -> IntColumn:
    """`counts` [B] numbers from each of `firsts` [B] on, one run after the other."""
    places: IntColumn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(firsts, counts) + places


def refuse(bad: NDArray[np.bool_], name: str, slots: IntColumn, reason: str) -> None:
    """Raises BadStep, naming the field and the first bad row's slot, if any row [B] is bad."""
    if bad.any():
        raise BadStep(name, f"slot {slots[bad.argmax()]} {reason}")
