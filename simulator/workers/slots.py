"""A worker's slots without tensors: enough to answer steps and detect invalid ones."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.v1.worker_pb2 import NewSequence, SchedulerOutput
from scheduler_svc.core import KvGroup
from simulator.workers.group_tables import GroupTables
from simulator.workers.host_blocks import HostBlocks
from simulator.workers.host_blocks import InconsistentStep as InconsistentStep
from simulator.workers.prompt_outputs import PromptOutputRequest, logprob_of
from wire.columns import unpack
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptOutput
from wire.state_hash import StateHashes, block_weights, slot_hashes, table_sums

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
NO_LOGPROBS = -1
MAX_GRANTED_STEPS = 64


def token_at(
    seed: NDArray[np.uint64], position: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int32]:
    """The token of a sequence at a position: a fixed function of its seed, in any batch."""
    mixed = (seed + (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(vocab_size)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step."""

    token_ids: NDArray[np.int32]
    num_computed_tokens: int
    logprobs: LogprobColumns | None
    prompt_outputs: list[PromptOutput]


class FakeSlots:
    """Columns by slot; every change is checked as strictly as by a real worker."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        groups: tuple[KvGroup, ...],
        max_model_len: int,
        num_host_blocks: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._tables = [GroupTables(group, max_num_seqs, max_model_len) for group in groups]
        self._live = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_top = np.full(max_num_seqs, NO_LOGPROBS)
        self._named: dict[int, list[int]] = {}  # by slot: tokens to report for the likeliest
        self._is_prompt_only = np.zeros(max_num_seqs, dtype=np.bool_)
        self._prompt_requests: dict[int, PromptOutputRequest] = {}  # by slot
        self._host_blocks = HostBlocks(num_host_blocks)
        self._rows: NDArray[np.integer] | None = None  # of the last step, if it was computed
        # Unused rows take address space, not memory.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._weights = block_weights(self._tables[0].block_ids.shape[1])

    @property
    def num_live(self) -> int:
        """Number of slots that hold a sequence."""
        return int(self._live.sum())

    @property
    def context_tokens(self) -> int:
        """Number of tokens with KV in the rows of the last step."""
        return 0 if self._rows is None else int(self._num_computed[self._rows].sum())

    def apply(self, step: SchedulerOutput) -> Outcome:
        """Applies a step and samples. Raises BadStep, naming the field."""
        self._change(step)
        if not step.same_rows:
            self._rows = unpack(step.slots, name="slots")
        if self._rows is None:
            raise InconsistentStep("same_rows: the step before it was not computed")
        return self._compute(self._rows, unpack(step.num_scheduled, name="num_scheduled"), step)

    def skip(self, frame: SchedulerOutput | None) -> None:
        """Ends a grant without computing; applies the frame's changes unless applied already."""
        if frame is not None:
            self._change(frame)
        self._rows = None

    def state(self) -> StateHashes:
        """The hash of each live slot."""
        slots = np.flatnonzero(self._live)
        num_computed = self._num_computed[slots]
        tokens = self._token_ids[slots, np.maximum(num_computed - 1, 0)]
        first = self._tables[0]
        width = int(first.num_blocks[slots].max(initial=0))
        sums = table_sums(first.block_ids[slots, :width], self._weights)
        return StateHashes(slots, slot_hashes(slots, sums, num_computed, tokens))

    def _change(self, step: SchedulerOutput) -> None:
        if step.granted_steps > MAX_GRANTED_STEPS:
            raise InconsistentStep(
                f"granted_steps: {step.granted_steps} of at most {MAX_GRANTED_STEPS}"
            )
        if step.granted_steps and (step.reset or step.new_sequences or step.num_scheduled):
            raise InconsistentStep("granted_steps: every row of a grant decodes")
        if step.reset:
            self._live[:] = False
        freed = unpack(step.freed_slots, name="freed_slots")
        if not self._live[freed].all():
            raise InconsistentStep("freed_slots: a slot is empty")
        self._live[freed] = False
        for new in step.new_sequences:
            self._enter(new)
        self._tables[0].append(step.appended_slots, step.appended_block_ids)
        groups = [appended.group for appended in step.appended_to_groups]
        if groups != sorted(set(groups) & set(range(1, len(self._tables)))):
            raise InconsistentStep(f"appended_to_groups: {groups} of {len(self._tables)} groups")
        for appended in step.appended_to_groups:
            self._tables[appended.group].append(appended.slots, appended.block_ids)
        self._host_blocks.apply(step)

    def _enter(self, new: NewSequence) -> None:
        slot = new.slot
        if self._live[slot]:
            raise InconsistentStep(f"new_sequences: slot {slot} is taken")
        token_ids = unpack(new.token_ids, name="token_ids")
        if len(new.group_block_ids) != len(self._tables) - 1:
            raise InconsistentStep(
                f"group_block_ids: {len(new.group_block_ids)} tables after that of group 0"
            )
        self._live[slot] = True
        self._token_ids[slot, : len(token_ids)] = token_ids
        self._num_tokens[slot] = len(token_ids)
        self._num_computed[slot] = new.num_computed_tokens
        for table, column in zip(self._tables, (new.block_ids, *new.group_block_ids), strict=True):
            table.enter(slot, unpack(column, name="block_ids"), new.num_computed_tokens)
        self._seed[slot] = new.sampling.seed
        self._is_prompt_only[slot] = new.prompt_only
        self._prompt_requests.pop(slot, None)
        prompt_request = PromptOutputRequest.of(new, self._vocab_size)
        if prompt_request is not None:
            if new.num_computed_tokens > prompt_request.begin < prompt_request.end:
                raise InconsistentStep(
                    "prompt_output_begin: what is to be reported is computed already"
                )
            self._prompt_requests[slot] = prompt_request
        asks = new.sampling.HasField("logprobs")
        self._num_top[slot] = new.sampling.logprobs if asks else NO_LOGPROBS
        self._named[slot] = list(new.sampling.logprob_token_ids)

    def _compute(
        self, rows: NDArray[np.integer], chunks: NDArray[np.integer], step: SchedulerOutput
    ) -> Outcome:
        if not self._live[rows].all():
            raise InconsistentStep("slots: a row's slot is empty")
        after = self._num_computed[rows] + (chunks if len(chunks) else 1)
        if (after > self._num_tokens[rows]).any():
            raise InconsistentStep("num_scheduled: a row computes tokens that do not exist")
        if step.granted_steps and (after < self._num_tokens[rows]).any():
            raise InconsistentStep("granted_steps: a row does not decode")
        last = after + max(step.granted_steps - 1, 0)
        for table in self._tables:
            table.check_room(rows, last)
        prompt_outputs = self._compute_prompt_outputs(rows, after)
        self._num_computed[rows] = after
        sampled = rows[(after == self._num_tokens[rows]) & ~self._is_prompt_only[rows]]
        positions = self._num_tokens[sampled]
        self._num_tokens[sampled] += 1
        num_computed = int(chunks.sum()) if len(chunks) else len(rows)
        token_ids = token_at(self._seed[sampled], positions, self._vocab_size)
        self._token_ids[sampled, positions] = token_ids
        return Outcome(token_ids, num_computed, self._logprobs(sampled, token_ids), prompt_outputs)

    def _compute_prompt_outputs(
        self, rows: NDArray[np.integer], after: NDArray[np.integer]
    ) -> list[PromptOutput]:
        if not self._prompt_requests:
            return []
        found = [
            self._prompt_requests[slot].answer(int(self._num_computed[slot]), int(end))
            for slot, end in zip(rows.tolist(), after, strict=True)
            if slot in self._prompt_requests
        ]
        return [answer for answer in found if answer is not None]

    def _logprobs(
        self, slots: NDArray[np.integer], token_ids: NDArray[np.int32]
    ) -> LogprobColumns | None:
        num_top = self._num_top[slots]
        rows = np.flatnonzero(num_top != NO_LOGPROBS)
        if not len(rows):
            return None
        logprobs, ranks = logprob_of(token_ids[rows])
        named = [self._named[slot] for slot in slots[rows].tolist()]
        width = max(num_top[rows].max(), *map(len, named))
        top_ids = (token_ids[rows, None] + np.arange(width)) % self._vocab_size
        for row, ids in zip(top_ids, named, strict=True):
            row[: len(ids)] = ids
        return LogprobColumns(rows, logprobs, ranks, top_ids, logprob_of(top_ids)[0])
