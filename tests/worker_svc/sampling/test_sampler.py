"""The sampler against an independent float64 reference, golden vectors and statistics."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.worker_svc.sampling_reference import reference_distribution
from worker_svc.sampling import sampler
from worker_svc.sampling.logits_processors import Entries, LogitsProcessors
from worker_svc.sampling.random_numbers import gumbel_noise, noise_keys
from worker_svc.sampling.sampler import SamplingRows, sample


def rows_of(*rows: dict[str, float], masked: list[tuple[int, int]] | None = None) -> SamplingRows:
    off = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 0, "output_position": 0}
    full = [off | row for row in rows]
    floats = {
        name: np.array([row[name] for row in full], dtype=np.float32)
        for name in ("temperature", "top_p", "min_p")
    }
    ints = {
        name: np.array([row[name] for row in full], dtype=np.int64)
        for name in ("top_k", "seed", "output_position")
    }
    pairs = np.array(masked or [], dtype=np.int64).reshape(-1, 2)
    logits_processors = LogitsProcessors(masked=Entries(pairs[:, 0], pairs[:, 1]))
    return SamplingRows(**floats, **ints, logits_processors=logits_processors)


def draws(logits: torch.Tensor, count: int, **parameters: float) -> NDArray[np.int64]:
    """Tokens at output positions 0 to count - 1 of one request."""
    rows = [parameters | {"seed": 7, "output_position": position} for position in range(count)]
    return sample(logits.repeat(count, 1), rows_of(*rows)).token_ids.numpy()


def support(logits: list[float], **parameters: float) -> set[int]:
    return set(draws(torch.tensor([logits]), 4000, **parameters).tolist())


def test_top_k_keeps_the_three_largest_of_the_golden_vector() -> None:
    assert support([3.5, 2.1, 1.8, 0.5, 0.1, -0.2, -1.0], top_k=3) == {0, 1, 2}


def test_top_k_keeps_ties_at_its_edge() -> None:
    assert support([2.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.40, 0.25, 0.15, 0.12, 0.05, 0.03]).tolist()
    assert support(logits, top_p=0.9) == {0, 1, 2, 3}
    assert support(logits, top_p=0.35) == {0}


def test_top_p_counts_only_what_top_k_left() -> None:
    # The first three, renormalized to .47 .35 .18: two of them reach 0.8.
    logits = np.log([0.40, 0.30, 0.15, 0.10, 0.05]).tolist()
    assert support(logits, top_k=3, top_p=0.8) == {0, 1}
    assert support(logits, top_p=0.8) == {0, 1, 2}


def test_min_p_keeps_tokens_in_proportion_to_the_likeliest() -> None:
    assert support(np.log([0.5, 0.3, 0.15, 0.05]).tolist(), min_p=0.25) == {0, 1, 2}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [0.828, 0.112, 0.041, 0.019]),
        (1.0, [0.575, 0.211, 0.128, 0.086]),
        (2.0, [0.406, 0.246, 0.192, 0.157]),
    ],
)
def test_temperature_gives_the_golden_distribution(
    temperature: float, expected: list[float]
) -> None:
    tokens = draws(torch.tensor([[2.0, 1.0, 0.5, 0.1]]), 40_000, temperature=temperature)
    assert np.bincount(tokens, minlength=4) / 40_000 == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("parameters", "large"),  # more tokens than the smallest candidate width
    [
        ({"temperature": 0.7}, 1301),
        ({"temperature": 1.3, "top_p": 0.8}, 1301),
        ({"temperature": 1.0, "top_k": 20}, 1301),
        ({"temperature": 1.0, "min_p": 0.05}, 1301),
        ({"temperature": 0.9, "top_k": 50, "top_p": 0.93, "min_p": 0.01}, 1301),
        ({"temperature": 1.5, "top_k": 2000, "top_p": 0.99}, 3001),
    ],
)
def test_draws_follow_the_reference_distribution(
    parameters: dict[str, float], large: int, is_large: bool
) -> None:
    """Chi-squared test at a fixed seed, with a bound far above chance."""
    vocab_size = large if is_large else 61
    logits = np.random.default_rng(1).normal(size=vocab_size) * 2
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    expected = reference_distribution(logits.astype(np.float32).astype(np.float64), **full)
    count = 5000
    batch = torch.from_numpy(logits.astype(np.float32))[None]
    counts = np.bincount(draws(batch, count, **parameters), minlength=vocab_size)
    assert not counts[expected == 0].any()
    # Bins with few expected draws are merged, as the test requires.
    frequent = expected * count >= 8
    seen = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum()) * count
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("widths", [(4,), (4, 16), (64,)])
def test_few_candidates_give_the_same_tokens_as_a_full_sort(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rounded logits have many ties, also at the boundary of the candidates.
    logits = (torch.randn(300, 97, generator=torch.Generator().manual_seed(3)) * 2).round()
    generator = np.random.default_rng(5)
    rows = rows_of(
        *(
            {
                "temperature": float(generator.choice([0.5, 1.0, 2.0])),
                "top_p": float(generator.choice([0.3, 0.9, 1.0])),
                "top_k": int(generator.choice([0, 1, 3, 30])),
                "min_p": float(generator.choice([0.0, 0.02, 0.5])),
                "seed": int(generator.integers(1 << 62)),
            }
            for _ in range(300)
        )
    )
    whole = sample(logits.clone(), rows).token_ids
    monkeypatch.setattr(sampler, "CANDIDATE_WIDTHS", widths)
    assert torch.equal(sample(logits.clone(), rows).token_ids, whole)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(8, 40_000, generator=torch.Generator().manual_seed(0)) * 3
    parameters = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.5, "top_k": 10},
        {"temperature": 3.0},
    ]
    rows = [row | {"seed": 11 * i, "output_position": i} for i, row in enumerate(parameters)]
    together = sample(logits.clone(), rows_of(*rows)).token_ids.tolist()
    alone = [
        int(sample(logits[i : i + 1].clone(), rows_of(row)).token_ids) for i, row in enumerate(rows)
    ]
    reverse = sample(logits.flip(0), rows_of(*rows[::-1])).token_ids.tolist()[::-1]
    assert together == alone == reverse


def test_masked_tokens_are_never_sampled_by_any_kind_of_row() -> None:
    logits = torch.zeros(3, 5)
    logits[:, 2] = 50.0
    rows = rows_of(
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.5},
        masked=[(0, 2), (1, 2), (2, 2)],
    )
    assert 2 not in sample(logits, rows).token_ids.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_apart_and_the_others_are_untouched(bad: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = rows_of(
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 1, "top_k": 3},
    )
    expected = sample(logits.clone(), rows).token_ids.tolist()
    for row in range(4):
        spoiled = logits.clone()
        spoiled[row, 17] = bad
        sampled = sample(spoiled, rows)
        assert sampled.finite.tolist() == [other != row for other in range(4)]
        assert sampled.token_ids.tolist() == [0 if i == row else t for i, t in enumerate(expected)]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> np.ndarray:
    """The uniform numbers [R, N] that the Gumbel noise is computed from."""
    token_ids = torch.arange(num_tokens, dtype=torch.int32)
    return (-(-gumbel_noise(noise_keys(seeds, positions), token_ids).double()).exp()).exp().numpy()


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 62])
def test_gumbel_noise_is_even_and_uncorrelated_in_every_direction(seed: int) -> None:
    positions = torch.arange(400)
    numbers = uniforms(torch.full_like(positions, seed), positions, 500)  # [positions, tokens]
    assert numbers.min() > 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 49 + 5 * math.sqrt(98)
    for first, second in (
        (numbers[:, :-1], numbers[:, 1:]),  # neighbouring tokens
        (numbers[:-1], numbers[1:]),  # neighbouring positions
        (numbers[:-1, 1:], numbers[1:, :-1]),
    ):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01


def test_neighbouring_seeds_have_unrelated_noise() -> None:
    seeds = torch.arange(400)
    numbers = uniforms(seeds, torch.zeros_like(seeds), 500)
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01


def test_a_last_bit_of_difference_between_batches_changes_no_token() -> None:
    logits = (
        torch.randn((64, 5000), generator=torch.Generator().manual_seed(3)) * 0.1
    )  # nearly flat
    rows = SamplingRows.alike(64, 1.0, top_p=1.0)
    rows.seed[:] = np.arange(64)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4)) * 1e-6
    before = sample(logits.clone(), rows).token_ids
    after = sample(logits + noise, rows).token_ids
    assert before.tolist() == after.tolist()


def test_seeds_a_stride_apart_share_no_numbers() -> None:
    gamma = 0x9E3779B97F4A7C15 - (1 << 64)
    positions = torch.arange(100)
    first = noise_keys(torch.zeros(100, dtype=torch.int64), positions).tolist()
    second = noise_keys(torch.full((100,), gamma), positions).tolist()
    assert not set(first) & set(second)


def test_gumbel_noise_is_pinned_so_that_an_upgrade_changes_no_output() -> None:
    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return value ^ (value >> 31)

    def number(key: int, token_id: int) -> float:
        bits = (token_id * 0x9E3779B1 + key) % (1 << 32)
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B % (1 << 32)
        bits ^= key >> 32
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 % (1 << 32)
        bits ^= bits >> 16
        return -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))

    gamma = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (42, 7), ((1 << 64) - 1, 100_000)):
        key = mix((mix((seed + gamma) % (1 << 64)) + (position + 1) * gamma) % (1 << 64))
        signed = seed - (1 << 64) if seed >> 63 else seed
        keys = noise_keys(torch.tensor([signed]), torch.tensor([position]))
        assert keys.item() % (1 << 64) == key
        found = gumbel_noise(keys, torch.tensor([0, 1, 49_151, 151_935], dtype=torch.int32))
        expected = [number(key, token_id) for token_id in (0, 1, 49_151, 151_935)]
        assert found[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
