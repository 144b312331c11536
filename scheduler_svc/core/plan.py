"""What passes through the core: a step's plan out, its result in, tokens and ends to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.block_moves import BlockMoves
from scheduler_svc.core.request import FinishReason, Request, TokenIds
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import Index, Roster, Slots


class OutOfStep(Exception):
    """An answer that does not fit the steps in flight."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters a slot, in full; a resumed one brings its output along."""

    slot: int
    request: Request
    token_ids: TokenIds
    num_computed_tokens: int
    block_ids: list[int]
    num_first_cached_tokens: int  # of the prompt, when it was first admitted
    stop_ids: tuple[int, ...]  # masked by the worker until min_tokens
    report_begin: int = 0  # before this position there is nothing to report


class Cause(Enum):
    """Why nobody more was admitted in a step."""

    SLOTS = "slots"
    BUDGET = "budget"
    BLOCKS = "blocks"
    SIBLING = "sibling"  # the first in line awaits a prompt that a sibling computes
    TOKEN = "token"  # the first in line awaits one that is on its way
    PREEMPTION = "preemption"  # somebody was just sent back, and must not be overtaken


@dataclass(frozen=True, slots=True)
class Held:
    """Why the queue did not move on, and who in particular did not fit."""

    cause: Cause
    first: str = ""  # the request at the head, where it is the reason
    blocks_short: Mapping[str, int] = field(default_factory=dict)  # by request


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step's row has to report: positions `begin` to (not including) `end`."""

    sequence: Sequence
    slot: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Report:
    """That a worker reported on positions of a slot's prompt; the shell holds what it said."""

    slot: int
    begin: int
    end: int
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a report is for."""

    request: Request
    row: int  # among the result's reports


# Nobody changes a plan or the outputs. They are not frozen because they are made at every step, and
# freezing two dozen fields would take a tenth of its time.
@dataclass(slots=True)
class StepPlan:
    """One step, as a change to what the worker holds, in the order in which it applies."""

    step_id: int
    ack_step_id: int
    reset: bool
    freed_slots: list[int]
    new_sequences: list[NewSequence]
    appended_slots: list[int]
    appended_block_ids: list[int]
    same_rows: bool
    slots: Slots  # [rows], in batch order
    num_scheduled: NDArray[np.int32] | None  # [rows]; None: one token each
    num_computed: NDArray[np.int32]  # [rows], before the step
    sampled_slots: Slots  # the rows that end at their last token and so sample one
    roster: Roster  # whoever runs, in order: for the debug view
    preempted: list[str] = field(default_factory=list)
    num_free_blocks: int = 0
    held: Held | None = None  # None: nobody waits
    moves: BlockMoves | None = None
    grant_id: int | None = None  # the first step of the grant that it belongs to, if of any
    asked: list[Asked] = field(default_factory=list)  # in batch order
    prompt_ends: list[Sequence] = field(default_factory=list)  # done with this step, unsampled

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.slots) if self.num_scheduled is None else int(self.num_scheduled.sum())

    def sequences(self) -> list[Sequence]:
        """Whom the rows belong to, in batch order."""
        by_slot = dict(zip(self.roster.slots.tolist(), self.roster.sequences, strict=True))
        return [by_slot[slot] for slot in self.slots.tolist()]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a worker answered to one step."""

    step_id: int
    token_ids: TokenIds  # one per sampled slot of the plan, in its order
    bad_rows: tuple[int, ...] = ()  # indices into token_ids that have no token
    reports: tuple[Report, ...] = ()  # one for each that the plan asked for
    # The bad rows whose own parameters leave no token, and why; other rows' logits were not finite.
    dead_ends: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, once per request."""

    request: Request
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None  # the stop token that ended it, end-of-sequence excepted
    message: str = ""

    @classmethod
    def of(
        cls, sequence: Sequence, reason: FinishReason, message: str, eos_token_ids: tuple[int, ...]
    ) -> "Finished":
        """The end of a sequence that holds all its tokens."""
        last = int(sequence.token_ids[-1])
        names_token = reason is FinishReason.STOP and (
            last not in eos_token_ids or sequence.request.ignore_eos
        )
        return cls(
            request=sequence.request,
            reason=reason,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=sequence.num_output,
            num_cached_tokens=sequence.num_cached or 0,
            stop_token_id=last if names_token else None,
            message=message,
        )


@dataclass(slots=True)
class StepOutputs:
    """Tokens of one step as columns, to be sorted by client, and the requests that it ended."""

    clients: NDArray[np.int32]
    handles: NDArray[np.uint32]
    token_ids: TokenIds
    finished: list[Finished]
    # The row of the step's result that each token comes from; None: all of them, in their order.
    sampled_rows: Index | None = None
    told: list[Told] = field(default_factory=list)  # to be delivered before the tokens
