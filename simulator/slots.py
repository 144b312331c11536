"""What a worker keeps of each slot, without tensors: enough to answer steps and catch bad ones."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.v1.worker_pb2 import NewSequence, SchedulerOutput
from rpc.columns import unpack
from rpc.logprobs import LogprobColumns
from rpc.prompt_reports import PromptReport
from simulator.questions import Question, logprob_of

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
NO_LOGPROBS = -1


class BadStep(ValueError):
    """A step that does not follow from the steps before it."""


def token_at(
    seed: NDArray[np.uint64], position: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int32]:
    """The token a sequence has at a position: a fixed function of its seed, whatever the batch."""
    mixed = (seed + (position.astype(np.uint64) + np.uint64(1)) * _GOLDEN) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(vocab_size)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step brought."""

    token_ids: NDArray[np.int32]
    num_computed_tokens: int
    logprobs: LogprobColumns | None
    reports: list[PromptReport]


class FakeSlots:
    """Columns by slot; every delta is checked as strictly as a real worker would."""

    def __init__(self, max_num_seqs: int, vocab_size: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._live = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_top = np.full(max_num_seqs, NO_LOGPROBS)
        self._is_prompt_only = np.zeros(max_num_seqs, dtype=np.bool_)
        self._questions: dict[int, Question] = {}  # by slot
        self._rows: NDArray[np.integer] = np.empty(0, dtype=np.int32)

    @property
    def num_live(self) -> int:
        """Slots that hold a sequence."""
        return int(self._live.sum())

    @property
    def context_tokens(self) -> int:
        """Tokens with KV of the rows of the last step."""
        return int(self._num_computed[self._rows].sum())

    def apply(self, step: SchedulerOutput) -> Outcome:
        """Applies a step and samples; raises BadStep naming the field."""
        if step.reset:
            self._live[:] = False
        self._live[unpack(step.freed_slots, name="freed_slots")] = False
        for new in step.new_sequences:
            self._enter(new)
        appended = unpack(step.appended_slots, name="appended_slots")
        np.add.at(self._num_blocks, appended, 1)
        if not step.same_rows:
            self._rows = unpack(step.slots, name="slots")
        return self._compute(unpack(step.num_scheduled, name="num_scheduled"))

    def _enter(self, new: NewSequence) -> None:
        if self._live[new.slot]:
            raise BadStep(f"new_sequences: slot {new.slot} is taken")
        self._live[new.slot] = True
        self._num_tokens[new.slot] = len(new.token_ids) // 4
        self._num_computed[new.slot] = new.num_computed_tokens
        self._num_blocks[new.slot] = len(new.block_ids) // 4
        self._seed[new.slot] = new.sampling.seed
        self._is_prompt_only[new.slot] = new.prompt_only
        self._questions.pop(new.slot, None)
        question = Question.of(new, self._vocab_size)
        if question is not None:
            if new.num_computed_tokens > question.begin < question.end:
                raise BadStep("report_begin: what is to be reported is computed already")
            self._questions[new.slot] = question
        asks = new.sampling.HasField("logprobs")
        self._num_top[new.slot] = new.sampling.logprobs if asks else NO_LOGPROBS

    def _compute(self, chunks: NDArray[np.integer]) -> Outcome:
        rows = self._rows
        if not self._live[rows].all():
            raise BadStep("slots: a row's slot is empty")
        after = self._num_computed[rows] + (chunks if len(chunks) else 1)
        if (after > self._num_tokens[rows]).any():
            raise BadStep("num_scheduled: a row computes tokens that do not exist")
        if (after > self._num_blocks[rows] * self._block_size).any():
            raise BadStep("num_scheduled: a row's block table is too short")
        reports = self._reports(rows, after)
        self._num_computed[rows] = after
        sampled = rows[(after == self._num_tokens[rows]) & ~self._is_prompt_only[rows]]
        positions = self._num_tokens[sampled]
        self._num_tokens[sampled] += 1
        num_computed = int(chunks.sum()) if len(chunks) else len(rows)
        token_ids = token_at(self._seed[sampled], positions, self._vocab_size)
        return Outcome(token_ids, num_computed, self._logprobs(sampled, token_ids), reports)

    def _reports(self, rows: NDArray[np.integer], after: NDArray[np.integer]) -> list[PromptReport]:
        if not self._questions:
            return []
        answers = [
            self._questions[slot].answer(int(self._num_computed[slot]), int(end))
            for slot, end in zip(rows.tolist(), after, strict=True)
            if slot in self._questions
        ]
        return [answer for answer in answers if answer is not None]

    def _logprobs(
        self, slots: NDArray[np.integer], token_ids: NDArray[np.int32]
    ) -> LogprobColumns | None:
        num_top = self._num_top[slots]
        rows = np.flatnonzero(num_top != NO_LOGPROBS)
        if not len(rows):
            return None
        logprobs, ranks = logprob_of(token_ids[rows])
        top_ids = (token_ids[rows, None] + np.arange(num_top[rows].max())) % self._vocab_size
        return LogprobColumns(rows, logprobs, ranks, top_ids, logprob_of(top_ids)[0])
