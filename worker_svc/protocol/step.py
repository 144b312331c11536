"""Values of the step protocol: input and output of a step.

Plain data with numpy columns, independent of protobuf and torch.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptOutput
from wire.sampling import GREEDY_TEMPERATURE
from wire.state_hash import StateHashes
from wire.tracing.context import TraceContext
from worker_svc.protocol.kv_groups import LayerGroup, TableLayout

IntColumn = NDArray[np.int64]

# Status of a row; the numbers are those of RowStatus in the protocol.
ROW_OK = 0
ROW_NOT_FINITE = 1
ROW_DEAD_END = 2
ROW_REFUSED = 3


def no_entries() -> IntColumn:
    """A column of length 0."""
    return np.zeros(0, dtype=np.int64)


class BadStep(ValueError):
    """A step that cannot be executed; the message names the field and the reason."""

    def __init__(self, field_name: str, reason: str) -> None:
        super().__init__(f"{field_name}: {reason}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that every step must respect."""

    num_blocks: int  # the null block 0 included
    block_size: int  # of KV group 0
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_host_blocks: int = 0
    num_tier_blocks: int = 0  # of the tier in host memory, numbered from 1
    num_disk_blocks: int = 0  # that the disk tier has room for
    has_transports: bool = False  # blocks come from other workers
    num_state_snapshots: int = 0  # numbered from 1
    kv_groups: tuple[LayerGroup, ...] = ()  # group 0 first; empty: it alone, without a window

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of group 0 in the longest sequence's table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The KV groups, at least one."""
        return self.kv_groups or (LayerGroup(self.block_size),)

    @property
    def tables(self) -> TableLayout:
        """The block tables of a slot."""
        return TableLayout.of(self.groups, self.max_model_len)

    @property
    def most_blocks_held(self) -> int:
        """Most blocks that the longest sequence holds at once, in all groups."""
        length, chunk = self.max_model_len, self.max_num_batched_tokens
        return sum(group.most_blocks(length, chunk) for group in self.groups)

    @property
    def max_decode_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that a step can have, given the slots and the token budget."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)


class Pooling(Enum):
    """The way in which hidden states are combined into one embedding of a prompt."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of one row, with defaults filled in."""

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
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, addend)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int | None = None  # None: report no log probabilities
    grammar: str = ""  # constrains the output; empty: none
    num_prompt_logprobs: int | None = None  # None: report none for the prompt
    logprob_token_ids: tuple[int, ...] = ()  # reported in place of the likeliest; empty: those
    pooling: Pooling | None = None  # None: no embedding
    refusal: str = ""  # why the row gets no token; empty: it is as it should be

    @property
    def has_penalties(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)

    @property
    def has_processors(self) -> bool:
        """True if logits processors other than min_tokens apply."""
        lists = self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids
        return bool(lists) or self.has_penalties or bool(self.grammar)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filters(self) -> bool:
        """True if it is drawn from a part of the vocabulary; greedy ones never are."""
        return not self.is_greedy and bool(self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a sequence's prompt."""

    position: int  # of its first placeholder
    preparation_id: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A complete sequence, to be placed into a slot."""

    slot: int
    request_id: str
    token_ids: NDArray[np.int32]  # prompt, and output so far if resumed
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: NDArray[np.int32]
    sampling: RowSampling = field(default_factory=RowSampling)
    prompt_output_begin: int = 0  # first prompt position with outputs due
    prompt_only: bool = False  # no token is sampled
    grammar_preparation: int = 0  # of its grammar; 0: it was not prepared
    adapter_preparation: int = 0  # of its adapter; 0: it has none
    trace: TraceContext | None = None  # of a request that is traced
    state_snapshot: int = 0  # of its states after the computed tokens; 0: there is none
    # The tables of the groups after group 0, one for each.
    group_block_ids: tuple[NDArray[np.int32], ...] = ()
    pictures: tuple[PlacedPicture, ...] = ()  # of its prompt, in order of position

    @property
    def prompt_output_end(self) -> int:
        """End of the prompt positions with outputs due; 0: no outputs."""
        if self.sampling.pooling is not None:
            return self.num_prompt_tokens
        if self.sampling.num_prompt_logprobs is not None:
            return self.num_prompt_tokens - 1  # the last one predicts no prompt token
        return 0


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks that block tables of one group after group 0 gain."""

    group: int
    slots: IntColumn  # may repeat
    block_ids: IntColumn  # same length


@dataclass(frozen=True, slots=True)
class StepMoves:
    """Block copies before the rows are computed, executed in this order."""

    swapped_out: IntColumn
    to_host: IntColumn  # same length
    from_host: IntColumn
    swapped_in: IntColumn  # same length
    copied_from: IntColumn
    copied_to: IntColumn  # same length


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A snapshot to make of a slot's states once so many of its tokens are computed."""

    slot: int
    position: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, as changes to the worker's state; the fields are applied in this order."""

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
    num_scheduled: IntColumn = field(default_factory=no_entries)  # tokens per row; empty: 1 each
    granted_steps: int = 0  # decode steps from this one on; 0: no grant
    wants_state: bool = False
    num_drafted: IntColumn = field(default_factory=no_entries)  # drafts per row; empty: none
    # Row after row; empty although there are drafts: the worker's draft model makes them.
    draft_token_ids: IntColumn = field(default_factory=no_entries)
    state_saves: tuple[SaveRequest, ...] = ()  # in this step or a later one
    appended_to_groups: tuple[GroupBlocks, ...] = ()  # ascending; none of a group without any

    @property
    def num_tokens(self) -> int:
        """Number of tokens in this step; 0 with same_rows."""
        return int(self.num_scheduled.sum()) if len(self.num_scheduled) else len(self.slots)

    @property
    def last_step_id(self) -> int:
        """Id of the grant's last step; of this step if it grants none."""
        return self.step_id + max(self.granted_steps, 1) - 1

    def steps(self) -> Iterator["StepInput"]:
        """This step, then the other steps of the grant: same rows, one token each."""
        yield self
        for step_id in range(self.step_id + 1, self.last_step_id + 1):
            yield StepInput(step_id, self.ack_step_id, same_rows=True)

    def appends_to(self, slots: Set[int]) -> bool:
        """True if a block table of one of these slots grows, in any group."""
        appended = (self.appended_slots, *(one.slots for one in self.appended_to_groups))
        return not all(slots.isdisjoint(some.tolist()) for some in appended)

    def changes(self) -> "StepInput":
        """This step's state changes alone, with nothing to compute."""
        nothing = no_entries()
        return replace(
            self,
            same_rows=False,
            slots=nothing,
            num_scheduled=nothing,
            granted_steps=0,
            wants_state=False,
            num_drafted=nothing,
            draft_token_ids=nothing,
        )


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Granted steps to skip, unless they have begun."""

    first_step_id: int
    last_step_id: int


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Duration of a step's phases, in microseconds."""

    queue_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    copy_us: int = 0
    idle_us: int = 0  # of the device before this step

    @property
    def busy_us(self) -> int:
        """Microseconds that the device computed this step."""
        return self.forward_us + self.sample_us + self.copy_us


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a step: a token and a status per sampled row, or an error."""

    step_id: int
    token_ids: NDArray[np.int32]
    row_status: NDArray[np.uint8] | None = None  # None: every row is ROW_OK
    error: str = ""
    timings: StepTimings = field(default_factory=StepTimings)
    logprobs: LogprobColumns | None = None  # of the rows that request them
    prompt_outputs: tuple[PromptOutput, ...] = ()  # of this step's prompt positions
    state: StateHashes | None = None  # after the step, if it requested them
    row_errors: dict[int, str] = field(default_factory=dict)  # by row: why it has no token
    num_sampled: IntColumn | None = None  # of token_ids, by row that sampled; None: one each


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step as listed by the debug service."""

    step_id: int
    request_ids: tuple[str, ...]
    slots: IntColumn
    num_computed: IntColumn
    num_scheduled: IntColumn
    num_decode_rows: int
    duration_us: int
    timings: StepTimings
    error: str = ""
