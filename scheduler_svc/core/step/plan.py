"""Values that pass through the core: plans out, results in, tokens and ends to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.block_moves import BlockMoves
from scheduler_svc.core.kv.slots import Index, RunningSet, Slots
from scheduler_svc.core.kv.state_snapshots import StateSave
from scheduler_svc.core.request.request import FinishReason, Request, TokenIds
from scheduler_svc.core.request.requirement import Requirement
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.request.timeline import Timeline


@dataclass(frozen=True, slots=True)
class WorkerDraft:
    """A draft that the worker makes itself: nothing but its length is known here."""

    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, part: slice) -> "WorkerDraft":
        return WorkerDraft(len(range(self.num_tokens)[part]))


# By slot: tokens that may follow its last known one. A slot without tokens here has asked for some.
Drafts = Mapping[int, TokenIds | WorkerDraft]
NO_DRAFTS: Drafts = {}


class OutOfStep(Exception):
    """Raised when an answer does not fit the steps in flight."""


@dataclass(frozen=True, slots=True)
class EnteringSequence:
    """A sequence that enters a slot, with all its tokens; a resumed one includes its output."""

    slot: int
    request: Request
    token_ids: TokenIds
    num_computed_tokens: int
    block_ids: list[int]  # of group 0
    num_first_cached_tokens: int  # prompt tokens cached at the first admission
    stop_ids: tuple[int, ...]  # masked by the worker until min_tokens
    prompt_output_begin: int = 0  # no prompt outputs are due before this position
    # Ids of the preparations that it uses up, by what it requires.
    preparations: Mapping[Requirement, int] = field(default_factory=dict)
    group_block_ids: tuple[list[int], ...] = ()  # the block tables of groups after group 0
    state_snapshot: int | None = None  # of its states after the computed tokens; None: zeros


@dataclass(frozen=True, slots=True)
class AppendedBlocks:
    """Blocks that block tables of one KV group gain."""

    group: int
    slots: list[int]  # may repeat
    block_ids: list[int]  # one per slot


class Cause(Enum):
    """Why no further sequence was admitted in a step."""

    SLOTS = "slots"
    BUDGET = "budget"
    BLOCKS = "blocks"
    FORK_GROUP = "fork group"  # another of its fork group computes the first's prompt
    TOKEN = "token"  # the first in the queue awaits a token in flight
    PREPARATION = "preparation"  # all that wait await what they require
    KV = "kv"  # all that wait await what they require, or KV from a tier
    DRAIN = "drain"  # the group takes no new sequence
    PREEMPTION = "preemption"  # a sequence was just preempted and must not be overtaken


@dataclass(frozen=True, slots=True)
class AdmissionHold:
    """Why waiting sequences were not admitted, and which of them did not fit."""

    cause: Cause
    first: str = ""  # id of the first waiting request, where it is the reason
    blocks_short: Mapping[str, int] = field(default_factory=dict)  # request id to missing blocks


@dataclass(frozen=True, slots=True)
class PromptOutputRange:
    """Prompt outputs due from a row of a step: positions `begin` to (not including) `end`."""

    sequence: Sequence
    slot: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ReceivedPromptOutput:
    """Positions of a slot's prompt that a worker sent outputs for; the shell holds the values."""

    slot: int
    begin: int
    end: int
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class PromptOutputDelivery:
    """The request that a prompt output is delivered to."""

    request: Request
    row: int  # index among the result's reports


# Plans and outputs are never changed after they are made. They are not frozen because freezing two
# dozen fields would take a tenth of the time of every step.
@dataclass(slots=True)
class StepPlan:
    """One step as changes to the worker's state, in the order in which they apply."""

    step_id: int
    ack_step_id: int
    reset: bool
    freed_slots: list[int]
    new_sequences: list[EnteringSequence]
    appended_slots: list[int]
    appended_block_ids: list[int]
    same_rows: bool
    slots: Slots  # [rows], in batch order
    num_scheduled: NDArray[np.int32] | None  # [rows]; None: one token each
    num_computed: NDArray[np.int32]  # [rows], before the step
    sampled_slots: Slots  # slots of the rows that reach their last token and sample
    running: RunningSet  # in order: for the debug view
    preempted: list[str] = field(default_factory=list)
    num_free_blocks: int = 0
    hold: AdmissionHold | None = None  # None: no sequence waits
    moves: BlockMoves | None = None
    grant_id: int | None = None  # first step id of its grant, if it is of one
    due_prompt_outputs: list[PromptOutputRange] = field(default_factory=list)  # in batch order
    prompt_ends: list[Sequence] = field(default_factory=list)  # end with this step, unsampled
    num_prefill_tokens: int = 0  # tokens of prompts, and of output that is computed again
    appended_to_groups: tuple[AppendedBlocks, ...] = ()  # of the groups after group 0
    drafts: Drafts = field(default_factory=dict)  # that it verifies, part of num_scheduled
    state_saves: tuple[StateSave, ...] = ()  # snapshots made as their slots get there

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self.slots) if self.num_scheduled is None else int(self.num_scheduled.sum())

    @property
    def num_computed_after(self) -> NDArray[np.int32]:
        """Tokens of each row that are computed once the step is done."""
        after: NDArray[np.int32] = self.num_computed + (
            1 if self.num_scheduled is None else self.num_scheduled
        )
        return after

    def sequences(self) -> list[Sequence]:
        """The sequences of the rows, in batch order."""
        by_slot = dict(zip(self.running.slots.tolist(), self.running.sequences, strict=True))
        return [by_slot[slot] for slot in self.slots.tolist()]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to one step."""

    step_id: int
    token_ids: TokenIds  # one per sampled slot of the plan, in order; more where drafts came true
    bad_rows: tuple[int, ...] = ()  # indices into token_ids that have no token
    prompt_outputs: tuple[ReceivedPromptOutput, ...] = ()  # one per range due
    # Bad row to reason, where a row's own parameters left no token; in other bad rows the logits
    # were not finite.
    dead_ends: Mapping[int, str] = field(default_factory=dict)
    num_sampled: NDArray[np.int32] | None = None  # of token_ids, by sampled slot; None: one each


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request; exactly one per request."""

    request: Request
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None  # the stop token that ended it, unless end-of-sequence
    message: str = ""
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, sequence: Sequence, reason: FinishReason, message: str, eos_token_ids: tuple[int, ...]
    ) -> "Finished":
        """The end of a sequence that is not in a slot and so holds all its tokens."""
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
            timeline=sequence.timeline,
        )


@dataclass(slots=True)
class StepOutputs:
    """Tokens of one step as columns, and the requests that it ended."""

    clients: NDArray[np.int32]
    handles: NDArray[np.uint32]
    token_ids: TokenIds
    finished: list[Finished]
    # The row of the step's result per token; None: all rows, in order.
    sampled_rows: Index | None = None
    prompt_outputs: list[PromptOutputDelivery] = field(default_factory=list)  # before the tokens
