"""Steps whose rows verify drafts: their tokens are those of steps that sample one a row."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worker_svc.conftest import WORKER_CONFIG, make_prompt
from worker_svc.protocol.step import BadStep, NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

NUM_TOKENS = 24
BLOCKS = {0: [1, 2, 3, 4], 1: [5, 6, 7, 8]}
GREEDY = RowSampling(num_top_logprobs=2)
SAMPLED = RowSampling(temperature=1.0, top_p=0.9, seed=7, num_top_logprobs=2)
PENALIZED = RowSampling(
    temperature=0.8,
    seed=3,
    presence_penalty=1.5,
    frequency_penalty=1.0,
    repetition_penalty=1.3,
    num_top_logprobs=0,
)
NARROWED = RowSampling(
    temperature=1.0,
    seed=5,
    min_tokens=9,
    stop_token_ids=(3, 4, 5, 6, 7),
    bad_words_token_ids=((8, 9), (10,)),
    logit_bias=((11, 2.0),),
)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.fixture(scope="module")
def loaded(llama_folder: Path) -> startup.LoadedModel:
    return startup.load(WORKER_CONFIG, llama_folder, "float32", "")


class Driver:
    """A runner with one or two sequences; a step's drafts are what the caller says may follow."""

    def __init__(self, loaded: startup.LoadedModel, *samplings: RowSampling) -> None:
        self.runner: ModelRunner = startup.build_runner(WORKER_CONFIG, loaded, num_blocks=64)
        self.samplings = samplings
        self.tokens: list[list[int]] = [[] for _ in samplings]
        self.logprobs: list[list[float]] = [[] for _ in samplings]
        self.step_id = 0

    def enter(self) -> None:
        new = tuple(
            NewSequence(
                slot=slot,
                request_id=f"request-{slot}",
                token_ids=np.array(make_prompt(12 + slot, seed=slot), dtype=np.int32),
                num_prompt_tokens=12 + slot,
                num_computed_tokens=0,
                block_ids=np.array(BLOCKS[slot], dtype=np.int32),
                sampling=sampling,
            )
            for slot, sampling in enumerate(self.samplings)
        )
        counts = column(*(12 + slot for slot in range(len(new))))
        self.step(new_sequences=new, slots=column(*range(len(new))), num_scheduled=counts)

    def step(self, **fields: object) -> StepOutput:
        self.step_id += 1
        output = self.runner.execute(StepInput(self.step_id, wants_state=True, **fields))
        assert not output.error
        if output.row_status is None:
            self._take(output)
        return output

    def verify(self, *drafts: list[int]) -> list[int]:
        """One step; returns how many tokens it brought to each sequence."""
        before = [len(tokens) for tokens in self.tokens]
        self.step(
            slots=column(*range(len(drafts))),
            num_scheduled=column(*(1 + len(row) for row in drafts)),
            num_drafted=column(*map(len, drafts)),
            draft_token_ids=column(*(token for row in drafts for token in row)),
        )
        return [len(tokens) - n for tokens, n in zip(self.tokens, before, strict=True)]

    def _take(self, output: StepOutput) -> None:
        counts = [1] * len(self.tokens)
        if output.num_sampled is not None:
            counts = output.num_sampled.tolist()
        assert sum(counts) == len(output.token_ids)
        first = 0
        for slot, count in enumerate(counts):
            own = slice(first, first + count)
            self.tokens[slot] += output.token_ids[own].tolist()
            if self.samplings[slot].num_top_logprobs is not None:
                assert output.logprobs is not None
                found = output.logprobs.select(np.arange(first, first + count))
                assert found is not None and len(found) == count
                self.logprobs[slot] += found.logprobs.tolist()
            first += count


def plain(loaded: startup.LoadedModel, *samplings: RowSampling) -> Driver:
    """The same sequences, a token a step."""
    driver = Driver(loaded, *samplings)
    driver.enter()
    while len(driver.tokens[0]) < NUM_TOKENS:
        driver.step(slots=column(*range(len(samplings))))
    return driver


def drafted(expected: list[int], known: int, right: int, wrong: int) -> list[int]:
    """So many right drafts after the known output, then so many wrong ones."""
    following = expected[known : known + right + wrong]
    return following[:right] + [(token + 1) % 64 for token in following[right:]]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED, NARROWED])
@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (2, 2), (0, 3), (1, 0)])
def test_drafts_change_no_token(
    loaded: startup.LoadedModel, sampling: RowSampling, right: int, wrong: int
) -> None:
    expected, driver = plain(loaded, sampling), Driver(loaded, sampling)
    driver.enter()
    while len(driver.tokens[0]) + right + wrong < NUM_TOKENS:
        drafts = drafted(expected.tokens[0], len(driver.tokens[0]), right, wrong)
        assert driver.verify(drafts) == [right + 1]
    assert driver.tokens[0] == expected.tokens[0][: len(driver.tokens[0])]
    count = len(driver.logprobs[0])
    np.testing.assert_allclose(driver.logprobs[0], expected.logprobs[0][:count], atol=1e-4)


def test_rows_with_and_without_drafts_share_a_step(loaded: startup.LoadedModel) -> None:
    expected, driver = plain(loaded, SAMPLED, PENALIZED), Driver(loaded, SAMPLED, PENALIZED)
    driver.enter()
    assert driver.verify([], drafted(expected.tokens[1], 1, 2, 1)) == [1, 3]
    assert driver.verify(drafted(expected.tokens[0], 2, 3, 0), []) == [4, 1]
    ahead = drafted(expected.tokens[0], 6, 0, 2), drafted(expected.tokens[1], 5, 1, 1)
    assert driver.verify(*ahead) == [1, 2]
    driver.step(slots=column(0, 1))
    for slot in (0, 1):
        assert driver.tokens[slot] == expected.tokens[slot][:8]


def test_the_state_after_refused_drafts_is_that_of_the_accepted(
    loaded: startup.LoadedModel,
) -> None:
    expected, driver = plain(loaded, GREEDY), Driver(loaded, GREEDY)
    driver.enter()
    driver.verify(drafted(expected.tokens[0], 1, 1, 3))
    other = Driver(loaded, GREEDY)
    other.enter()
    for _ in range(2):
        plainly = other.step(slots=column(0))
    assert plainly.state is not None
    output = driver.step(slots=column(0))
    also = other.step(slots=column(0))
    assert output.state is not None and also.state is not None
    assert output.state.hashes.tolist() == also.state.hashes.tolist()


def test_a_draft_that_cannot_be_verified_is_refused(
    loaded: startup.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(loaded, GREEDY)
    driver.enter()
    with pytest.raises(BadStep, match="num_drafted: slot 0 does not decode"):
        driver.step(
            slots=column(0),
            num_scheduled=column(2),
            num_drafted=column(2),
            draft_token_ids=column(1, 2),
        )
    monkeypatch.setattr(ModelRunner, "verifies_drafts", False)
    with pytest.raises(BadStep, match="this worker verifies no drafts"):
        driver.verify([1])
    monkeypatch.undo()
    ruled = Driver(loaded, replace(GREEDY, grammar="start: /a*/"))
    with pytest.raises(BadStep, match="has a grammar, which reads no drafts"):
        ruled.enter()
        ruled.verify([1])
