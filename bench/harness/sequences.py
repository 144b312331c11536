"""Sequences that a model runner computes step by step: at once, in chunks, anew, or with drafts.

No scheduler and no wire: which rows a step has is decided here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.speculation.lookup import look_up
from scheduler_svc.speculation.options import SpeculationOptions
from worker_svc.protocol.step import NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how those that follow are chosen."""

    token_ids: tuple[int, ...]
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute the outputs of all prompts."""

    num_tokens: int  # of each output
    most_at_once: int  # prompt tokens of a step
    drafts: SpeculationOptions | None = None


@dataclass(slots=True)
class _Row:
    """A sequence in its slot."""

    slot: int
    prompt: Prompt
    output: list[int]
    num_computed: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt.token_ids, *self.output]

    @property
    def num_waiting(self) -> int:
        """Known tokens that are not computed."""
        return len(self.prompt.token_ids) + len(self.output) - self.num_computed

    def entering(self, num_blocks: int) -> NewSequence:
        """The sequence as the worker first sees it."""
        first = 1 + self.slot * num_blocks
        return NewSequence(
            slot=self.slot,
            request_id=str(self.slot),
            token_ids=np.array(self.token_ids, dtype=np.int32),
            num_prompt_tokens=len(self.prompt.token_ids),
            num_computed_tokens=0,
            block_ids=np.arange(first, first + num_blocks, dtype=np.int32),
            sampling=self.prompt.sampling,
        )


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks of a sequence of so many tokens and the drafts of one more step."""
    return -(-(num_tokens + 33) // block_size)


class RunnerSequences:
    """Computes outputs on a runner, one call after another."""

    def __init__(self, runner: ModelRunner, blocks_per_sequence: int) -> None:
        self._runner = runner
        self._num_blocks = blocks_per_sequence
        self._step_id = 0
        self.num_drafted = 0  # tokens, in all calls

    def outputs(
        self, prompts: Sequence[Prompt], way: Way, known: Sequence[Sequence[int]] = ()
    ) -> list[list[int]]:
        """All outputs; the first tokens of each may be known, and are computed with its prompt."""
        given = known or [()] * len(prompts)
        pairs = enumerate(zip(prompts, given, strict=True))
        rows = [_Row(slot, prompt, [*output]) for slot, (prompt, output) in pairs]
        entering = [row.entering(self._num_blocks) for row in rows]
        self._prefill(rows, entering, way.most_at_once)
        while left := [row for row in rows if len(row.output) < way.num_tokens]:
            self._decode(left, way)
        return [row.output for row in rows]

    def _prefill(self, rows: list[_Row], entering: list[NewSequence], most_at_once: int) -> None:
        """Computes all known tokens in as many steps as it takes; each row samples one token."""
        waiting, entered = deque(rows), False
        while waiting:
            budget, taken = most_at_once, list[tuple[_Row, int]]()
            while waiting and budget:
                size = min(waiting[0].num_waiting, budget)
                taken.append((waiting[0], size))
                budget -= size
                if size < waiting[0].num_waiting:
                    break
                waiting.popleft()
            ended = [row for row, size in taken if size == row.num_waiting]
            new = () if entered else tuple(entering)
            self._step(taken, ended, new_sequences=new, reset=not entered)
            entered = True

    def _decode(self, rows: list[_Row], way: Way) -> None:
        drafts = [self._drafts(row, way) for row in rows]
        if not any(map(len, drafts)):
            self._step([(row, 1) for row in rows], rows)
            return
        self.num_drafted += sum(map(len, drafts))
        self._step(
            [(row, 1 + len(one)) for row, one in zip(rows, drafts, strict=True)],
            rows,
            num_drafted=np.array([*map(len, drafts)], dtype=np.int64),
            draft_token_ids=np.concatenate(drafts).astype(np.int64),
        )

    def _drafts(self, row: _Row, way: Way) -> np.ndarray:
        if way.drafts is None:
            return np.zeros(0, dtype=np.int32)
        found = look_up(np.array(row.token_ids, dtype=np.int32), way.drafts)
        return found[: way.num_tokens - len(row.output) - 1]

    def _step(
        self, taken: Sequence[tuple[_Row, int]], sampling: Sequence[_Row], **fields: object
    ) -> None:
        """Runs a step of so many tokens of each row; `sampling` rows take what it brings."""
        self._step_id += 1
        launched = self._runner.launch(
            StepInput(
                self._step_id,
                slots=np.array([row.slot for row, _ in taken]),
                num_scheduled=np.array([size for _, size in taken], dtype=np.int64),
                **fields,  # type: ignore[arg-type]
            )
        )
        output = launched if isinstance(launched, StepOutput) else launched.result()
        if output.error:
            raise RuntimeError(output.error)
        counts = [1] * len(sampling) if output.num_sampled is None else output.num_sampled.tolist()
        tokens = output.token_ids.tolist()
        for row, size in taken:
            if row not in sampling:
                row.num_computed += size
        for row, count in zip(sampling, counts, strict=True):
            row.output += tokens[:count]
            del tokens[:count]
            row.num_computed = len(row.prompt.token_ids) + len(row.output) - 1
