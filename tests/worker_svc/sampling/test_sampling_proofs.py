"""The exact set of tokens kept by the filters, and their frequencies in 100,000 draws."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.worker_svc.sampling_reference import reference_distribution
from worker_svc.sampling import sampler
from worker_svc.sampling.sampler import SamplingRows, sample

Filters = dict[str, float]
NUM_DRAWS = 100_000
LEAST_EXPECTED = 8  # draws per bin, required by the chi-squared test


def rows_alike(count: int, parameters: Filters, seeds: NDArray[np.int64]) -> SamplingRows:
    def column(name: str, default: float, kind: type) -> NDArray[np.generic]:
        return np.full(count, parameters.get(name, default), dtype=kind)

    return SamplingRows(
        temperature=column("temperature", 1.0, np.float32),
        top_p=column("top_p", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        min_p=column("min_p", 0.0, np.float32),
        seed=seeds,
        output_position=np.zeros(count, dtype=np.int64),
    )


def reference(logits: torch.Tensor, parameters: Filters) -> NDArray[np.float64]:
    """The expected distribution, with the parameters rounded to float32 as in the sampler."""
    temperature, top_p, min_p = (
        float(np.float32(parameters.get(name, default)))
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0))
    )
    top_k = int(parameters.get("top_k", 0))
    return reference_distribution(logits.double().numpy(), temperature, top_k, top_p, min_p)


def kept_tokens(
    logits: torch.Tensor, parameters: Filters, monkeypatch: pytest.MonkeyPatch
) -> set[int]:
    """Tokens that can be drawn: for each token, one row in which it gets the largest noise."""
    count = len(logits)
    monkeypatch.setattr(sampler, "noise_keys", lambda seeds, positions: seeds)

    def put_first(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return (token_ids == keys[:, None]).float() * 1e6

    monkeypatch.setattr(sampler, "gumbel_noise", put_first)
    rows = rows_alike(count, parameters, np.arange(count))
    winners = sample(logits.repeat(count, 1), rows).token_ids
    return set(np.flatnonzero(winners.numpy() == np.arange(count)).tolist())


FILTERS: list[Filters] = [
    {
        name: value
        for name, value in zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True)
        if value
    }
    for values in itertools.product((0.6, 1.7), (0, 7, 150), (0, 0.5, 0.95), (0, 0.03))
]


@pytest.mark.parametrize("widths", [(1024, 8192), (16,), (4, 64)])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_filters_keep_what_the_reference_keeps(
    widths: tuple[int, ...], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat and peaked logits; small candidate widths reach every branch of the sampler."""
    monkeypatch.setattr(sampler, "CANDIDATE_WIDTHS", widths)
    generator = torch.Generator().manual_seed(11)
    for parameters in FILTERS:
        logits = torch.randn(211, generator=generator) * spread
        expected = set(np.flatnonzero(reference(logits, parameters)).tolist())
        assert kept_tokens(logits, parameters, monkeypatch) == expected, parameters


def test_ties_stand_or_fall_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal tokens at the boundary, top-p keeps the lower ids; top-k and min-p keep all."""
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 1.0])
    weights = torch.softmax(logits.double(), 0)
    top_p = float(weights[1] * 2 + weights[0] * 1.5)
    for widths in ((1024,), (2,)):
        monkeypatch.setattr(sampler, "CANDIDATE_WIDTHS", widths)
        assert kept_tokens(logits, {"top_p": top_p}, monkeypatch) == {0, 1, 2, 3}
        assert kept_tokens(logits, {"top_k": 3}, monkeypatch) == {0, 1, 2, 3, 4, 6}
        min_p = float(weights[0] / weights[1])
        assert kept_tokens(logits, {"min_p": min_p * 0.999}, monkeypatch) == {0, 1, 2, 3, 4, 6}


def p_value(seen: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """p-value of Pearson's chi-squared test; bins with few expected draws are merged."""
    wanted = expected * seen.sum()
    frequent = wanted >= LEAST_EXPECTED
    observed = np.append(seen[frequent], seen[~frequent].sum())
    hoped = np.append(wanted[frequent], wanted[~frequent].sum())
    observed, hoped = observed[hoped > 0], hoped[hoped > 0]
    statistic = torch.tensor(((observed - hoped) ** 2 / hoped).sum() / 2)
    freedom = torch.tensor((len(hoped) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic))


def count_draws(logits: torch.Tensor, parameters: Filters, num_draws: int) -> NDArray[np.int64]:
    """Number of draws of each token, with one seed per draw."""
    seen = np.zeros(len(logits), dtype=np.int64)
    for seeds in np.split(np.arange(num_draws), num_draws // 20_000):
        batch = logits.repeat(len(seeds), 1)
        drawn = sample(batch, rows_alike(len(seeds), parameters, seeds)).token_ids
        seen += np.bincount(drawn.numpy(), minlength=len(logits))
    return seen


DISTRIBUTIONS: list[Filters] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.85, "min_p": 0.05},
]


@pytest.mark.parametrize("parameters", DISTRIBUTIONS, ids=str)
def test_a_hundred_thousand_draws_follow_the_reference(parameters: Filters) -> None:
    """One draw for each of many seeds: p above 0.01."""
    logits = torch.randn(97, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = reference(logits, parameters)
    seen = count_draws(logits, parameters, NUM_DRAWS)
    assert not seen[expected == 0].any()
    assert p_value(seen, expected) > 0.01


@pytest.mark.parametrize("parameters", [{"top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_flat_rows_that_are_cut_by_their_weights_follow_the_reference(
    parameters: Filters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "CANDIDATE_WIDTHS", (64,))
    logits = torch.randn(400, generator=torch.Generator().manual_seed(6)) * 0.4
    expected = reference(logits, parameters)
    assert np.count_nonzero(expected) > 64
    seen = count_draws(logits, parameters, num_draws=20_000)
    assert not seen[expected == 0].any()
    assert p_value(seen, expected) > 0.01


def test_greedy_rows_take_the_likeliest_whatever_the_seed() -> None:
    logits = torch.randn(97, generator=torch.Generator().manual_seed(5))
    rows = rows_alike(5000, {"temperature": 0.0}, np.arange(5000))
    assert set(sample(logits.repeat(5000, 1), rows).token_ids.tolist()) == {int(logits.argmax())}


def test_the_statistic_finds_a_small_bias() -> None:
    """The test can fail: 20 % more draws of one token in 97 are rejected."""
    expected = np.full(97, 1 / 97)
    biased = expected.copy()
    biased[3] *= 1.2
    rng = np.random.default_rng(0)
    fair = p_value(rng.multinomial(NUM_DRAWS, expected), expected)
    assert fair > 0.01 > p_value(rng.multinomial(NUM_DRAWS, biased / biased.sum()), expected)
