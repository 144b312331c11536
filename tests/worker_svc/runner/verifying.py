"""Sequences whose steps verify drafts that are right as far as a test says."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker_svc.protocol.step import NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner

Drafted = Mapping[int, tuple[int, int]]  # by slot: how many right drafts, then how many wrong ones


@dataclass(slots=True)
class Told:
    """The tokens of all steps, by slot, and the states after them."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    hashes: list[list[int]] = field(default_factory=list)


class Verifying:
    """A scheduler's part: two steps in flight, but for slots that verify."""

    def __init__(
        self, runner: ModelRunner, blocks_per_seq: int, expected: Told | None = None
    ) -> None:
        self.told = Told()
        self._runner = runner
        self._blocks_per_seq = blocks_per_seq
        self._expected = expected or Told()
        self._in_flight: deque[tuple[Any, list[int], dict[int, int] | None]] = deque()
        self._step_id = 0
        self._samplings: dict[int, RowSampling] = {}

    def enter(
        self, slot: int, prompt: Sequence[int], sampling: RowSampling, num_computed: int = 0
    ) -> NewSequence:
        self.told.tokens[slot], self.told.logprobs[slot] = [], []
        self._samplings[slot] = sampling
        first = 1 + slot * self._blocks_per_seq
        return NewSequence(
            slot=slot,
            request_id=f"request-{slot}",
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=num_computed,
            block_ids=np.arange(first, first + self._blocks_per_seq, dtype=np.int32),
            sampling=sampling,
        )

    def decode(self, slots: Sequence[int], drafted: Drafted | None = None) -> None:
        self.step(dict.fromkeys(slots, 1), drafted or {})

    def step(
        self,
        rows: Mapping[int, int],
        drafted: Drafted | None = None,
        new: Sequence[NewSequence] = (),
        unfinished: Sequence[int] = (),
    ) -> None:
        """Launches a step; `unfinished` are the slots with a chunk that ends before its prompt."""
        given = drafted or {}
        if given:
            self.drain()  # where the drafts begin
        drafts = {slot: self._drafts(slot, *given.get(slot, (0, 0))) for slot in rows}
        lengths = {slot: len(one) for slot, one in drafts.items()}
        sampled = [slot for slot in rows if slot not in unfinished]
        counts = {slot: 1 + given.get(slot, (0, 0))[0] for slot in sampled}
        token_ids = [token for one in drafts.values() for token in one]
        self._launch(rows, lengths if given else {}, token_ids, new, (sampled, counts))

    def drafted_there(self, slots: Sequence[int], lengths: Mapping[int, int]) -> None:
        """Rows that decode, of which the worker drafts so many tokens each."""
        self.drain()
        both = {slot: lengths.get(slot, 0) for slot in slots}
        self._launch(dict.fromkeys(slots, 1), both, [], (), (list(slots), None))

    def _launch(
        self,
        rows: Mapping[int, int],
        lengths: Mapping[int, int],
        token_ids: Sequence[int],
        new: Sequence[NewSequence],
        awaited: tuple[list[int], dict[int, int] | None],
    ) -> None:
        """With drafts of these lengths, of all rows or of none."""
        step = StepInput(
            step_id=self._step_id + 1,
            reset=not self._step_id,
            new_sequences=tuple(new),
            slots=np.array(list(rows)),
            num_scheduled=np.array([n + lengths.get(slot, 0) for slot, n in rows.items()]),
            num_drafted=np.array([*lengths.values()], np.int64),
            draft_token_ids=np.array(token_ids, np.int64),
            wants_state=True,
        )
        launched = self._runner.launch(step)
        if isinstance(launched, StepOutput) and launched.error:
            raise RuntimeError(launched.error)
        self._step_id += 1
        self._in_flight.append((launched, *awaited))
        while len(self._in_flight) > 1:
            self._collect()

    def drain(self) -> Told:
        while self._in_flight:
            self._collect()
        return self.told

    def _drafts(self, slot: int, right: int, wrong: int) -> list[int]:
        if not right + wrong:
            return []
        begin = len(self.told.tokens[slot])
        following = self._expected.tokens[slot][begin : begin + right + wrong]
        assert len(following) == right + wrong
        return following[:right] + [(token + 1) % 64 for token in following[right:]]

    def _collect(self) -> None:
        launched, sampled, counts = self._in_flight.popleft()
        output = launched
        if not isinstance(launched, StepOutput):
            output = launched.result()
            launched.record(output)
        assert not output.error and output.row_status is None
        given = [1] * len(sampled) if output.num_sampled is None else output.num_sampled.tolist()
        assert counts is None or given == [counts[slot] for slot in sampled]
        first = 0
        for slot, count in zip(sampled, given, strict=True):
            own = np.arange(first, first + count)
            self.told.tokens[slot] += output.token_ids[own].tolist()
            if self._samplings[slot].num_top_logprobs is not None:
                found = output.logprobs.select(own)
                assert len(found) == count
                self.told.logprobs[slot] += found.logprobs.tolist()
            first += count
        assert first == len(output.token_ids)
        self.told.hashes.append(output.state.hashes.tolist())


def without_drafts(
    runner: ModelRunner,
    blocks_per_seq: int,
    prompts: Mapping[int, list[int]],
    how: Mapping[int, RowSampling],
    num_tokens: int,
) -> Told:
    """So many tokens of each sequence, one a step."""
    client = Verifying(runner, blocks_per_seq)
    new = [client.enter(slot, prompt, how[slot]) for slot, prompt in prompts.items()]
    client.step({slot: len(prompt) for slot, prompt in prompts.items()}, new=new)
    for _ in range(num_tokens - 1):
        client.decode(list(prompts))
    return client.drain()


def check_same(found: Told, expected: Told) -> None:
    """The same tokens, as far as both go, and the same log probabilities within rounding."""
    for slot, tokens in found.tokens.items():
        assert tokens == expected.tokens[slot][: len(tokens)], slot
        logprobs = expected.logprobs[slot][: len(found.logprobs[slot])]
        np.testing.assert_allclose(found.logprobs[slot], logprobs, atol=1e-3)
