"""Sampling with vocabulary parallelism equals sampling from whole rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker_svc.conftest import VOCAB_SIZE, make_prompt
from tests.worker_svc.parallel.test_tensor_parallel import build, column, on_ranks, save, sequence
from tests.worker_svc.sampling.test_sampler import rows_of
from worker_svc.parallel import group as parallel
from worker_svc.parallel.group import Group
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import RowSampling, StepInput
from worker_svc.sampling.sampler import Sampled, SamplingRows, sample, sample_part

PLAIN = rows_of(
    {"temperature": 0},
    {"temperature": 1e-5, "seed": 1},
    {"temperature": 0.05, "seed": 2},
    {"temperature": 1, "seed": 3, "output_position": 9},
    {"temperature": 3, "seed": -4},
)
FILTERED = rows_of({"temperature": 0}, {"seed": 5}, {"seed": 6, "top_p": 0.8}, {"seed": 7})


class Counting:
    """A process group that records the shapes given to its gathers."""

    def __init__(self, collectives: Any) -> None:
        self._collectives = collectives
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def _allgather_base(self, whole: torch.Tensor, part: torch.Tensor, options: object) -> object:
        self.sizes.append(part.numel())
        return self._collectives._allgather_base(whole, part, options)


def counting(group: Group) -> list[int]:
    """Element counts of this group's gathers from now on."""
    group._collectives = Counting(group._collectives)
    sizes: list[int] = group._collectives.sizes
    return sizes


def sample_on(size: int, logits: torch.Tensor, rows: SamplingRows) -> list[tuple[Sampled, int]]:
    """Samples on each of several ranks; returns the samples and the gathered element counts."""

    def work(group: Group) -> tuple[Sampled, int]:
        sizes, width = counting(group), logits.shape[1] // size
        first = group.rank * width
        part = VocabPart(logits[:, first : first + width].clone(), first, group)
        return sample_part(part, rows), sum(sizes)

    return on_ranks(size, work)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_filters_give_the_same_tokens_and_exchange_two_numbers_each(
    size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        logits = (torch.randn((len(PLAIN), 1000), generator=generator) * 4).to(dtype)
        expected = sample(logits.float(), PLAIN)
        for sampled, num_given in sample_on(size, logits, PLAIN):
            assert sampled.token_ids.tolist() == expected.token_ids.tolist()
            assert sampled.finite.all()
            assert num_given == 2 * len(PLAIN)


@pytest.mark.parametrize("tied", [(499, 500), (3, 500, 999), (700, 998)])
def test_of_equal_logits_on_two_ranks_the_lowest_token_is_the_greedy_one(
    tied: tuple[int, ...],
) -> None:
    logits = torch.zeros((len(PLAIN), 1000))
    logits[:, list(tied)] = 60.0
    expected = sample(logits.clone(), PLAIN).token_ids.tolist()
    assert expected[0] == tied[0]
    for sampled, _ in sample_on(2, logits, PLAIN):
        assert sampled.token_ids.tolist() == expected
        assert set(sampled.token_ids.tolist()[:3]) <= set(tied)


def test_equal_logits_are_drawn_alike_at_the_lowest_temperature() -> None:
    """With float32 scores near 60 / 1e-5 the noise would be rounded to halves, and ties decide."""
    logits = torch.zeros((400, 64))
    logits[:, [3, 17, 40, 63]] = 60.0
    rows = rows_of(*({"temperature": 1e-5, "seed": seed} for seed in range(400)))
    counts = sample(logits, rows).token_ids.bincount()
    assert counts[counts > 0].tolist() == counts[[3, 17, 40, 63]].tolist()
    assert counts[counts > 0].min() > 70


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("token", [10, 990])
def test_a_row_that_is_not_finite_on_one_rank_is_told_apart_on_all(bad: float, token: int) -> None:
    logits = torch.randn((len(PLAIN), 1000))
    expected = sample(logits.clone(), PLAIN).token_ids
    for row in (0, 3):
        damaged = logits.clone()
        damaged[row, token] = bad
        for sampled, _ in sample_on(2, damaged, PLAIN):
            assert (~sampled.finite).nonzero().flatten().tolist() == [row]
            assert sampled.token_ids[row] == 0
            others = torch.arange(len(PLAIN)) != row
            assert torch.equal(sampled.token_ids[others], expected[others])


def test_a_row_that_filters_is_sampled_from_all_its_logits() -> None:
    logits = torch.randn((len(FILTERED), 1000))
    expected = sample(logits.clone(), FILTERED).token_ids.tolist()
    for sampled, num_given in sample_on(2, logits, FILTERED):
        assert sampled.token_ids.tolist() == expected
        assert num_given == logits.numel() // 2


def test_the_ranks_of_a_model_exchange_candidates_until_a_row_filters(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save(tmp_path_factory.mktemp("llama"), "llama")
    expected = generate(folder, parallel.ALONE)
    logits = 3 * VOCAB_SIZE // 2

    def work(group: Group) -> tuple[list[list[int]], list[int]]:
        sizes = counting(group)
        return generate(folder, group), sizes

    assert on_ranks(2, work) == [(expected, [2, 4, 4, 4, logits, logits, 4])] * 2


def generate(folder: Path, group: Group) -> list[list[int]]:
    """Tokens of steps that a greedy row, a sampled row and a filtered row enter in turn, until the
    filtered one leaves."""
    runner = build(folder, group)
    samplings = (
        RowSampling(),
        RowSampling(temperature=0.7, seed=3),
        RowSampling(temperature=0.7, seed=4, top_k=9),
    )
    news = [
        sequence(slot, make_prompt(9, seed=slot), [1 + slot, 5 + slot], sampling)
        for slot, sampling in enumerate(samplings)
    ]
    steps = [
        StepInput(
            1, reset=True, new_sequences=(news[0],), slots=column(0), num_scheduled=column(9)
        ),
        StepInput(2, new_sequences=(news[1],), slots=column(0, 1), num_scheduled=column(1, 9)),
        StepInput(3, same_rows=True),
        StepInput(4, same_rows=True),
        StepInput(
            5, new_sequences=(news[2],), slots=column(0, 1, 2), num_scheduled=column(1, 1, 9)
        ),
        StepInput(6, same_rows=True),
        StepInput(7, freed_slots=column(2), slots=column(0, 1)),
    ]
    outputs = [runner.execute(step) for step in steps]
    assert not any(output.error for output in outputs)
    return [output.token_ids.tolist() for output in outputs]
