"""All logits processors against plain float64 Python, row by row."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from worker_svc.protocol.step import Limits, NewSequence, RowSampling, StepInput
from worker_svc.runner.batch_state import BatchState
from worker_svc.sampling import logits_processors
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.logits_processors import process_logits
from worker_svc.sampling.sampler import SamplingRows, sample

VOCAB_SIZE = 61
LIMITS = Limits(
    num_blocks=400,
    block_size=4,
    max_num_seqs=40,
    max_num_batched_tokens=4000,
    max_model_len=64,
    vocab_size=VOCAB_SIZE,
)


def rows_for(
    samplings: list[RowSampling], prompts: list[list[int]], outputs: list[list[int]]
) -> SamplingRows:
    """SamplingRows for sequences that a step has just added in full."""
    state = BatchState(LIMITS, torch.device("cpu"), Grammars(LIMITS.vocab_size))
    # Tokens of an earlier sequence in the same row must not count.
    state.token_rows.fill_(7)
    blocks = iter(range(1, LIMITS.num_blocks))
    sequences = []
    for slot, (sampling, prompt, output) in enumerate(
        zip(samplings, prompts, outputs, strict=True)
    ):
        token_ids = np.array(prompt + output, dtype=np.int32)
        block_ids = [next(blocks) for _ in range(-(-len(token_ids) // LIMITS.block_size))]
        sequences.append(
            NewSequence(
                slot=slot,
                request_id=f"request-{slot}",
                token_ids=token_ids,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=np.array(block_ids, dtype=np.int32),
                sampling=sampling,
            )
        )
    staged = state.stage(
        StepInput(
            1,
            new_sequences=tuple(sequences),
            slots=np.arange(len(sequences)),
            num_scheduled=np.array([len(s.token_ids) for s in sequences]),
        )
    )
    state.write(staged)
    return state.sampling_rows(staged)


def reference(
    logits: NDArray[np.float64], sampling: RowSampling, prompt: list[int], output: list[int]
) -> NDArray[np.float64]:
    """Applies the processors to one row, one after the other."""
    logits = logits.copy()
    for token_id in range(VOCAB_SIZE):
        if sampling.allowed_token_ids and token_id not in sampling.allowed_token_ids:
            logits[token_id] = -math.inf
    for *prefix, last in sampling.bad_words_token_ids:
        if output[len(output) - len(prefix) :] == prefix and len(output) >= len(prefix):
            logits[last] = -math.inf
    if len(output) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -math.inf
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in set(prompt + output):
        factor = sampling.repetition_penalty
        logits[token_id] *= factor if logits[token_id] <= 0 else 1 / factor
    for token_id in set(output):
        logits[token_id] -= sampling.frequency_penalty * output.count(token_id)
        logits[token_id] -= sampling.presence_penalty
    return logits


def random_samplings(generator: np.random.Generator, count: int) -> Iterator[RowSampling]:
    def some_ids(most: int) -> tuple[int, ...]:
        size = int(generator.integers(1, most))
        return tuple(generator.choice(VOCAB_SIZE, size, replace=False).tolist())

    for _ in range(count):
        asks = generator.random(6) < 0.5
        yield RowSampling(
            presence_penalty=float(generator.uniform(-2, 2)) if asks[0] else 0.0,
            frequency_penalty=float(generator.uniform(-2, 2)) if asks[1] else 0.0,
            repetition_penalty=float(generator.uniform(0.5, 2)) if asks[2] else 1.0,
            logit_bias=tuple((i, float(generator.uniform(-9, 9))) for i in some_ids(9))
            if asks[3]
            else (),
            allowed_token_ids=some_ids(40) if asks[4] else (),
            bad_words_token_ids=tuple(some_ids(4) for _ in range(5)) if asks[5] else (),
            min_tokens=int(generator.integers(0, 30)),
            stop_token_ids=some_ids(4),
        )


@pytest.mark.parametrize("rows_at_once", [1, 7, 32])
def test_a_batch_of_every_kind_of_rule_is_adjusted_as_the_reference_does(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_processors, "ROWS_AT_ONCE", rows_at_once)
    generator = np.random.default_rng(0)
    samplings = list(random_samplings(generator, 40))
    prompts = [generator.integers(0, VOCAB_SIZE, n + 1).tolist() for n in range(40)]
    outputs = [generator.integers(0, 12, 23 - n // 2).tolist() for n in range(40)]
    # Bad words that match the ends of the outputs.
    samplings[3] = RowSampling(bad_words_token_ids=((*outputs[3][-2:], 5), (outputs[3][-1], 5)))
    samplings[4] = RowSampling(bad_words_token_ids=((outputs[4][-1] + 20, 5), (6,)))
    logits = (generator.normal(size=(40, VOCAB_SIZE)) * 3).astype(np.float32)
    rows = rows_for(samplings, prompts, outputs)
    processed = torch.from_numpy(logits.copy())
    process_logits(processed, rows.logits_processors)
    expected = np.stack(
        [
            reference(*row)
            for row in zip(logits.astype(np.float64), samplings, prompts, outputs, strict=True)
        ]
    )
    assert np.array_equal(np.isinf(processed.numpy()), np.isinf(expected))
    np.testing.assert_allclose(processed.numpy(), expected, rtol=2e-5, atol=2e-5)
    assert np.isinf(expected[3, 5]) and np.isfinite(expected[4, 5]) and np.isinf(expected[4, 6])


def test_penalties_have_the_values_of_the_formulas() -> None:
    sampling = RowSampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    rows = rows_for([sampling], [[1, 2]], [[2, 3, 3]])
    logits = torch.ones(1, VOCAB_SIZE)
    logits[0, 2] = -1.0
    process_logits(logits, rows.logits_processors)
    # Tokens in the prompt only, in both, twice in the output, in neither.
    assert logits[0, 1:5].tolist() == [0.5, -2.75, -0.5, 1.0]


def test_rows_without_rules_are_left_alone_and_cost_no_adjustment() -> None:
    plain = RowSampling(temperature=0.7, top_p=0.5, min_tokens=2, stop_token_ids=(1,))
    rows = rows_for([plain], [[1, 2]], [[2, 3, 3]])
    assert not rows.logits_processors
    mixed = rows_for([plain, RowSampling(presence_penalty=2.0)], [[1], [1]], [[5, 6], [5, 6]])
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    processed = logits.clone()
    process_logits(processed, mixed.logits_processors)
    assert torch.equal(processed[0], logits[0])
    assert (processed[1] != logits[1]).nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_forbids(temperature: float) -> None:
    samplings = [
        RowSampling(temperature=temperature, seed=seed, logit_bias=((9, 100.0), (8, -100.0)))
        for seed in range(40)
    ]
    rows = rows_for(samplings, [[1]] * 40, [[8, 9]] * 40)
    logits = torch.zeros(40, VOCAB_SIZE)
    logits[:, 8] = 50.0
    assert sample(logits, rows).token_ids.unique().tolist() == [9]


@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_only_allowed_tokens_are_sampled(parameters: dict[str, float]) -> None:
    samplings = [
        RowSampling(temperature=2.0, seed=seed, allowed_token_ids=(3, 30, 60), **parameters)
        for seed in range(40)
    ]
    rows = rows_for(samplings, [[1]] * 40, [[]] * 40)
    drawn = sample(torch.zeros(40, VOCAB_SIZE), rows).token_ids
    assert set(drawn.tolist()) == {3, 30, 60}


def test_a_row_that_may_sample_nothing_fails_alone() -> None:
    stuck = RowSampling(allowed_token_ids=(5,), bad_words_token_ids=((5,),))
    rows = rows_for([stuck, RowSampling(allowed_token_ids=(6,))], [[1], [1]], [[], []])
    sampled = sample(torch.zeros(2, VOCAB_SIZE), rows)
    assert sampled.finite.tolist() == [True, True]
    assert sampled.has_choice is not None and sampled.has_choice.tolist() == [False, True]
    assert sampled.token_ids.tolist() == [0, 6]


def test_a_hundred_thousand_draws_follow_the_penalized_distribution() -> None:
    """Chi-squared test at p = 0.01, over a hundred seeds with a thousand positions each."""
    generator = np.random.default_rng(2)
    prompt, output = [3, 4, 5], generator.integers(0, 20, 15).tolist()
    sampling = RowSampling(
        temperature=0.9,
        presence_penalty=0.7,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        logit_bias=((11, 2.0),),
        bad_words_token_ids=((output[-1], 12), (13,)),
    )
    logits = generator.normal(size=VOCAB_SIZE).astype(np.float32)
    rows = rows_for([sampling], [prompt], [output])
    processed = torch.from_numpy(logits.copy())[None]
    process_logits(processed, rows.logits_processors)
    processed.clamp_(min=-1e4)  # the model's logits must be finite
    count = 100_000
    alike = SamplingRows.alike(count, temperature=0.9, top_p=1.0)
    seed, position = np.divmod(np.arange(count), 1000)
    many = replace(alike, seed=seed, output_position=position)
    counts = np.bincount(sample(processed.repeat(count, 1), many).token_ids, minlength=VOCAB_SIZE)
    weights = np.exp(reference(logits.astype(np.float64), sampling, prompt, output) / 0.9)
    expected = weights / weights.sum() * count
    assert counts[12] == counts[13] == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the 99th percentile.
    percentile = freedom * (1 - 2 / (9 * freedom) + 2.326 * math.sqrt(2 / (9 * freedom))) ** 3
    assert expected[possible].min() > 5
    assert statistic < percentile
