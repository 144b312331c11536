"""Sampling kernels against a sorting float64 reference, and their changes to the slot state."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling import shortlist
from kernels.sampling.filtered_draw import draw_filtered
from kernels.sampling.sample import (
    RING,
    Tokens,
    best_tokens,
    choose,
    find_candidates,
    output_ring,
)
from kernels.sampling.slot_state import NUM_FIELDS
from worker_svc.sampling.random_numbers import gumbel_noise, noise_keys

NUM_SLOTS = 7
LENGTH = 9
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True, slots=True)
class Row:
    """Sampling parameters and token counts of one row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_prompt: int = 2
    num_tokens: int = 3


def state_of(rows: dict[int, Row], device: torch.device) -> Tensor:
    """slot_state with these rows."""
    state = np.full((NUM_SLOTS, NUM_FIELDS.value), -1, dtype=np.int64)
    for slot, row in rows.items():
        floats = np.array([row.temperature, row.top_p, row.min_p], dtype=np.float32)
        seed = np.array([row.seed], dtype=np.uint64).view(np.int64)[0]
        state[slot, :4] = (row.num_tokens, row.num_prompt, seed, row.top_k)
        state[slot, 4:7] = floats.view(np.int32)
    return torch.from_numpy(state).to(device)


class Bench:
    """Slots, token rows and the ring; one call per step."""

    def __init__(self, rows: dict[int, Row], device: torch.device) -> None:
        self.slot_state = state_of(rows, device)
        self.token_rows = torch.full((NUM_SLOTS, LENGTH), 77, dtype=torch.int32, device=device)
        self.num_steps = torch.ones(1, dtype=torch.int32, device=device)
        self.ring = output_ring(NUM_SLOTS, device)
        self.device = device

    def step(
        self, logits: Tensor, slots: list[int], filters: bool = True, num_parts: int = 1
    ) -> list[int]:
        """Samples from whole logits or, if no row is filtered, from num_parts equal parts."""
        logits, width = logits.to(self.device), logits.shape[1] // num_parts
        column = torch.tensor(slots, dtype=torch.int32, device=self.device)
        found = [
            find_candidates(part, column, self.slot_state, index * width)
            for index, part in enumerate(logits.split(width, dim=1))
        ]
        tokens = Tokens(self.slot_state, self.token_rows, self.num_steps, self.ring)
        if filters:
            draw_filtered(logits, found[0], column, self.slot_state)
        choose(torch.stack(found), column, tokens)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.ring[int(self.num_steps) % RING, : len(slots)].tolist()


def test_the_best_token_is_the_lowest_of_the_best_and_none_if_a_part_is_not_finite() -> None:
    scores = [
        [[1.0, 5.0], [2.0, 2.0], [float("inf"), 3.0]],
        [[5.0, 0.0], [2.0, float("nan")], [1.0, 4.0]],
    ]
    tokens = [[[4.0, 9.0], [1.0, 7.0], [6.0, 8.0]], [[30.0, 41.0], [35.0, 44.0], [33.0, 40.0]]]
    candidates = torch.tensor([scores, tokens], dtype=torch.float64).transpose(0, 1)
    assert best_tokens(candidates).tolist() == [9, -1, 6]


def kept_weights(logits: Tensor, row: Row) -> Tensor:
    """Weights [V] float64, zero where a filter removes the token."""
    weights = ((logits.double() - logits.double().max()) / np.float32(row.temperature)).exp()
    kept = weights >= np.float32(row.min_p)
    if row.top_k:
        kept &= logits >= logits.sort(descending=True).values[row.top_k - 1]
    if row.top_p < 1:
        weights = torch.where(kept, weights, 0.0)
        order = weights.argsort(descending=True, stable=True)
        ends = weights[order].cumsum(0)
        count = int((ends < float(np.float32(row.top_p)) * ends[-1]).sum()) + 1
        nucleus = torch.zeros_like(kept)
        nucleus[order[:count]] = True
        kept &= nucleus
    return torch.where(kept, weights, 0.0)


def drawn(logits: Tensor, row: Row) -> int:
    weights = kept_weights(logits.cpu(), row)
    seed = torch.tensor([np.array([row.seed], dtype=np.uint64).view(np.int64)[0]])
    row_key = noise_keys(seed, torch.tensor([row.num_tokens - row.num_prompt]))
    numbers = gumbel_noise(row_key, torch.arange(len(weights), dtype=torch.int32))
    return int((weights.log() + numbers[0].double()).argmax())


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((num_rows, vocab_size), generator=generator) * 3).to(dtype)


FILTERS = [
    Row(temperature=1.0),
    Row(temperature=0.7, top_k=5),
    Row(temperature=1.3, top_p=0.8),
    Row(temperature=1.0, min_p=0.05),
    Row(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
    Row(temperature=2.0, top_k=1),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab_size", [11, 5000])
def test_draws_are_those_of_the_sorted_distribution(
    device: torch.device, dtype: torch.dtype, vocab_size: int
) -> None:
    rows = {
        slot: Row(**{**_fields(row), "seed": 2**64 - 5 - slot}) for slot, row in enumerate(FILTERS)
    }
    rows = {slot: row for slot, row in rows.items() if row.top_k <= vocab_size}
    logits = random_logits(len(rows), vocab_size, dtype)
    expected = [drawn(logits[i], row) for i, row in enumerate(rows.values())]
    assert Bench(rows, device).step(logits, list(rows)) == expected


def _fields(row: Row) -> dict[str, float]:
    return {name: getattr(row, name) for name in Row.__slots__}


def count_draws(
    row: Row, logits: Tensor, num_steps: int, device: torch.device, **options: object
) -> Tensor:
    """Number of draws of each token [V] from one row of logits, with a seed per slot."""
    slots, counts = list(range(NUM_SLOTS)), torch.zeros(logits.shape[1], dtype=torch.float64)
    for step in range(num_steps):
        rows = {slot: replace(row, seed=step * NUM_SLOTS + slot) for slot in slots}
        drawn = Bench(rows, device).step(logits.repeat(NUM_SLOTS, 1), slots, **options)
        counts += torch.bincount(torch.tensor(drawn), minlength=logits.shape[1])
    return counts


def test_only_kept_tokens_are_drawn_and_as_often_as_they_weigh(device: torch.device) -> None:
    row = Row(temperature=1.0, top_p=0.9)
    logits = random_logits(1, 16, torch.bfloat16)
    counts = count_draws(row, logits, 600 if device.type == "cuda" else 15, device)
    weights = kept_weights(logits[0], row)
    assert not counts[weights == 0].any()
    expected = weights[weights > 0] / weights.sum() * counts.sum()
    chi_squared = float(((counts[weights > 0] - expected) ** 2 / expected).sum())
    assert chi_squared < 3 * len(expected) + 10


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_greedy_takes_the_first_of_the_largest(
    device: torch.device, dtype: torch.dtype, filters: bool
) -> None:
    logits = random_logits(3, 9000, dtype)
    logits[0, [8999, 4321, 5000]] = 60.0
    logits[1] = -2.0
    rows = {slot: Row() for slot in range(3)}
    expected = [4321, 0, int(logits[2].argmax())]
    assert Bench(rows, device).step(logits, [0, 1, 2], filters) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_says_so_and_goes_on_with_token_0(
    device: torch.device, bad: float, temperature: float
) -> None:
    logits = random_logits(2, 6000, torch.bfloat16)
    logits[0, 5999] = bad
    bench = Bench({0: Row(temperature), 1: Row()}, device)
    assert bench.step(logits, [0, 1]) == [-1, int(logits[1].argmax())]
    assert bench.token_rows[0].tolist() == [77, 77, 77, 0, 77, 77, 77, 77, 77]
    assert bench.slot_state[:2, 0].tolist() == [4, 4]


def test_tokens_go_behind_the_known_ones_and_padding_leaves_nothing(device: torch.device) -> None:
    logits = random_logits(4, 50, torch.float32)
    bench = Bench({2: Row(num_tokens=4), 5: Row(num_tokens=8)}, device)
    before = bench.slot_state.clone()
    first, _, second, _ = bench.step(logits, [5, -1, 2, -1], filters=False)
    assert [first, second] == logits[[0, 2]].argmax(-1).tolist()
    expected = torch.full((NUM_SLOTS, LENGTH), 77, dtype=torch.int32)
    expected[5, 8], expected[2, 4] = first, second
    assert torch.equal(bench.token_rows.cpu(), expected)
    before[[2, 5], 0] += 1
    assert torch.equal(bench.slot_state, before)


def test_a_row_draws_the_same_alone_and_among_others_in_either_type(device: torch.device) -> None:
    row = Row(temperature=1.0, top_k=20, top_p=0.9, seed=11)
    logits = random_logits(5, 5000, torch.bfloat16)
    alone = Bench({3: row}, device).step(logits[2:3], [3])
    crowd = Bench({slot: Row(1.0, seed=slot) for slot in (0, 1, 4, 5)} | {6: row}, device)
    assert crowd.step(logits, [0, 1, 6, 4, 5])[2] == alone[0]
    assert Bench({3: row}, device).step(logits[2:3].float(), [3]) == alone


PLAIN = {
    0: Row(),
    1: Row(temperature=1.0, seed=3),
    2: Row(temperature=0.05, seed=4),
    3: Row(temperature=3.0, seed=2**63 + 5),
    4: Row(temperature=1e-5, seed=6),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_parts_of_a_vocabulary_give_the_tokens_of_the_whole(
    device: torch.device, dtype: torch.dtype, num_parts: int
) -> None:
    logits = random_logits(len(PLAIN), 5000, dtype)
    logits[:, 2499] = logits[:, 2500] = logits[:, 4999] = 60.0  # at boundaries of tiles and parts
    expected = [drawn(logits[slot], row) if slot else 2499 for slot, row in PLAIN.items()]
    whole = Bench(PLAIN, device).step(logits, list(PLAIN))
    parts = Bench(PLAIN, device).step(logits, list(PLAIN), filters=False, num_parts=num_parts)
    assert parts == whole == expected


def test_equal_logits_are_drawn_alike_at_the_lowest_temperature(device: torch.device) -> None:
    """With float32 scores near 60 / 1e-5 the noise would be rounded to halves, and ties decide."""
    logits = torch.zeros((1, 64))
    logits[0, [3, 17, 40, 63]] = 60.0
    counts = count_draws(Row(temperature=1e-5), logits, 10, device, filters=False, num_parts=2)
    assert counts[[3, 17, 40, 63]].min() > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_not_finite_if_one_part_of_it_is_not(
    device: torch.device, temperature: float
) -> None:
    logits = random_logits(2, 6000, torch.bfloat16)
    logits[0, 10], logits[1, 20] = float("nan"), 50.0
    bench = Bench({0: Row(temperature), 1: Row(temperature)}, device)
    assert bench.step(logits, [0, 1], filters=False, num_parts=4) == [-1, 20]


@pytest.mark.parametrize("length", [8, 300])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_how_many_tokens_are_listed_changes_no_draw(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, length: int, spread: float
) -> None:
    """Wide and narrow nuclei; top-k below and above the length of the list."""
    monkeypatch.setattr(shortlist, "LENGTH", length)
    rows = {
        slot: replace(row, top_k=2 * row.top_k, seed=slot) for slot, row in enumerate(FILTERS[1:])
    }
    logits = random_logits(len(rows), 5000, torch.bfloat16, seed=length) * spread
    expected = [drawn(logits[slot], row) for slot, row in rows.items()]
    assert Bench(rows, device).step(logits, list(rows)) == expected


def test_a_shortlist_has_all_tokens_from_its_weight_on_in_their_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "LENGTH", 256)
    rows = {0: Row(temperature=0.5, top_p=0.9), 1: Row(temperature=5.0, top_k=3), 2: Row()}
    logits = random_logits(3, 9000, torch.float32).to(device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    state = state_of(rows, device)
    lists = shortlist.shortlist(logits, find_candidates(logits, slots, state), slots, state)
    for slot in (0, 1):
        scaled = (logits[slot] - logits[slot].max()) / rows[slot].temperature
        counts = lists.counts[slot].sum(0)
        assert counts.sum() == 3 * 4096  # includes padding after the row, in level 0
        assert torch.isclose(lists.totals[slot].sum(), scaled.exp().sum())
        down_to = counts.flip(0).cumsum(0).flip(0)
        num_listed = int(down_to[1:][down_to[1:] <= 256].max())
        assert num_listed > 100
        listed = scaled.argsort(descending=True, stable=True)[:num_listed].sort().values
        assert torch.equal(lists.token_ids[slot, :num_listed].long(), listed)
        assert torch.equal(lists.logits[slot, :num_listed], logits[slot, listed])
