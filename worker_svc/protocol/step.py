"""Values of the step protocol: what one step asks of the worker and what it brought.

Plain data with numpy columns. Knows neither protobuf nor tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptReport
from wire.sampling import GREEDY_TEMPERATURE
from wire.state_hash import StateHashes

IntColumn = NDArray[np.int64]

# A row's outcome, as numbered by the contract's RowStatus.
ROW_OK = 0
ROW_NOT_FINITE = 1
ROW_DEAD_END = 2


def no_entries() -> IntColumn:
    """A column of length 0."""
    return np.zeros(0, dtype=np.int64)


class BadStep(ValueError):
    """A step that cannot be executed; says which field and why."""

    def __init__(self, field_name: str, reason: str) -> None:
        super().__init__(f"{field_name}: {reason}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What every step must stay within."""

    num_blocks: int  # the null block 0 included
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_host_blocks: int = 0

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_decode_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_step_tokens(self) -> int:
        """What a step can be filled with, whatever its budget."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)


class Pooling(Enum):
    """Which hidden states stand for a whole prompt."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's tokens are chosen, with every default filled in."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0  # 0 is off
    frequency_penalty: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int | None = None  # None: report no log probabilities
    grammar: str = ""  # that the output follows; empty: none
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    pooling: Pooling | None = None  # None: report no hidden states

    @property
    def has_penalties(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)

    @property
    def has_rules(self) -> bool:
        """Whether its logits are changed, other than by min_tokens."""
        lists = self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids
        return bool(lists) or self.has_penalties or bool(self.grammar)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence in full, as it enters a slot."""

    slot: int
    request_id: str
    token_ids: NDArray[np.int32]  # prompt and, when resumed, output so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: NDArray[np.int32]
    sampling: RowSampling = field(default_factory=RowSampling)
    report_begin: int = 0  # before this position of the prompt nothing is to be reported
    prompt_only: bool = False  # nothing is sampled

    @property
    def report_end(self) -> int:
        """End of the prompt positions with outputs due; 0: none."""
        if self.sampling.pooling is not None:
            return self.num_prompt_tokens
        if self.sampling.num_prompt_logprobs is not None:
            return self.num_prompt_tokens - 1  # what follows the last one is no prompt
        return 0


@dataclass(frozen=True, slots=True)
class StepMoves:
    """Whole blocks whose content moves before the rows compute, in this order."""

    swapped_out: IntColumn
    to_host: IntColumn  # one for each
    from_host: IntColumn
    swapped_in: IntColumn  # one for each
    copied_from: IntColumn
    copied_to: IntColumn  # one for each


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step as a change to what the worker holds; fields apply in the order they have here."""

    step_id: int
    ack_step_id: int = 0
    reset: bool = False
    freed_slots: IntColumn = field(default_factory=no_entries)
    new_sequences: tuple[NewSequence, ...] = ()
    appended_slots: IntColumn = field(default_factory=no_entries)
    appended_block_ids: IntColumn = field(default_factory=no_entries)
    moves: StepMoves | None = None
    same_rows: bool = False
    slots: IntColumn = field(default_factory=no_entries)
    num_scheduled: IntColumn = field(default_factory=no_entries)  # empty: one token each
    granted_steps: int = 0  # this decode step and those after it; 0: a step that is not granted
    wants_state: bool = False

    @property
    def num_tokens(self) -> int:
        """What it computes; 0 where the rows are those of the step before."""
        return int(self.num_scheduled.sum()) if len(self.num_scheduled) else len(self.slots)

    @property
    def last_step_id(self) -> int:
        """Itself, or the last step of the grant."""
        return self.step_id + max(self.granted_steps, 1) - 1

    def steps(self) -> Iterator["StepInput"]:
        """Itself, and the rest of the grant: the same rows, a token each."""
        yield self
        for step_id in range(self.step_id + 1, self.last_step_id + 1):
            yield StepInput(step_id, self.ack_step_id, same_rows=True)

    def changes(self) -> "StepInput":
        """What it changes, without computing anything."""
        nothing = no_entries()
        return replace(
            self,
            same_rows=False,
            slots=nothing,
            num_scheduled=nothing,
            granted_steps=0,
            wants_state=False,
        )


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Granted steps to leave out, as far as they have not begun."""

    first_step_id: int
    last_step_id: int


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a step's time went, in microseconds."""

    queue_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    copy_us: int = 0
    idle_us: int = 0  # of the device, between the step before and this one

    @property
    def busy_us(self) -> int:
        """In which the device computed it."""
        return self.forward_us + self.sample_us + self.copy_us


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought: a token and a status per row that sampled, or the error."""

    step_id: int
    token_ids: NDArray[np.int32]
    row_status: NDArray[np.uint8] | None = None  # None: every row is ROW_OK
    error: str = ""
    timings: StepTimings = field(default_factory=StepTimings)
    logprobs: LogprobColumns | None = None  # of the rows that asked for them
    prompt_reports: tuple[PromptReport, ...] = ()  # of parts of prompts that are asked about
    state: StateHashes | None = None  # of the slots after it, if the step wanted that
    row_errors: dict[int, str] = field(default_factory=dict)  # why, for every ROW_DEAD_END


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step as the debug service lists it."""

    step_id: int
    request_ids: tuple[str, ...]
    slots: IntColumn
    num_computed: IntColumn
    num_scheduled: IntColumn
    num_decode_rows: int
    duration_us: int
    timings: StepTimings
    error: str = ""
