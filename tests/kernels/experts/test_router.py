"""Routing kernels: experts and weights of rows, rows of experts, whatever the rows hold."""

import math

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.experts.router import Routing, route

EPS = 1e-6
# Rows, hidden size, experts, experts of a row; more than 32 rows are computed by tiles.
SHAPES = [(1, 64, 8, 2), (3, 100, 5, 5), (7, 48, 24, 3), (33, 72, 12, 4), (70, 160, 80, 1)]


def made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, hidden, experts, _ = shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator)
    router = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    return x.to(device, dtype), router.to(device, dtype)


def assert_lists_agree(routing: Routing) -> None:
    """Each pair of a row and an expert is in that expert's list, once."""
    found = {
        (pair, expert)
        for expert, count in enumerate(routing.counts.tolist())
        for pair in routing.pairs[expert, :count].tolist()
    }
    wanted = set(enumerate(routing.experts.flatten().tolist()))
    assert found == wanted
    assert int(routing.counts.sum()) == routing.num_pairs
    assert all(len(set(row)) == len(row) for row in routing.experts.tolist())


def test_a_row_that_no_program_holds_is_routed_by_tiles(device, assert_close):
    x, router = made((2, 8200, 4, 2), torch.float32, device)
    _, routing = route(x, router, None, EPS, 2, True)
    weights, chosen = reference.choose_experts(x @ router.T, 2, True)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_has_the_experts_of_its_largest_logits(
    shape, dtype, renormalizes, device, assert_close
):
    x, router = made(shape, dtype, device)
    found, routing = route(x, router, None, EPS, shape[3], renormalizes)
    assert found is x
    logits = x.float() @ router.float().T
    weights, chosen = reference.choose_experts(logits, shape[3], renormalizes)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)
    assert_lists_agree(routing)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_in_front_is_returned_and_routed_by(shape, device, assert_close):
    x, router = made(shape, torch.float32, device)
    norm = torch.rand(shape[1], device=device) + 0.5
    normed, routing = route(x, router, norm, EPS, shape[3], True)
    expected = reference.rms_norm(x, norm, EPS)
    assert_close(normed, expected)
    weights, chosen = reference.choose_experts(expected @ router.T, shape[3], True)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_rows_of_padding_have_experts_that_are_there(value, device):
    x, router = made((5, 64, 6, 4), torch.float32, device)
    x[1] = value
    _, routing = route(x, router, None, EPS, 4, False)
    assert_lists_agree(routing)
    assert set(routing.experts.flatten().tolist()) <= set(range(6))


def test_of_equal_logits_the_first_wins(device):
    x, router = torch.ones(1, 16, device=device), torch.ones(9, 16, device=device)
    _, routing = route(x, router, None, EPS, 3, True)
    assert routing.experts.tolist() == [[0, 1, 2]]
    assert routing.weights.tolist() == [pytest.approx([1 / 3] * 3)]


def test_rows_may_be_a_slice_of_wider_ones(device):
    wide, router = made((6, 96, 7, 2), torch.float32, device)
    _, apart = route(wide[:, 16:80], router[:, :64].contiguous(), None, EPS, 2, True)
    _, whole = route(wide[:, 16:80].contiguous(), router[:, :64].contiguous(), None, EPS, 2, True)
    assert torch.equal(apart.experts, whole.experts)


def test_wrong_arguments_are_refused_by_name(device):
    x, router = made((2, 32, 4, 2), torch.float32, device)
    with pytest.raises(ValueError, match="top_k: 5 of 4 experts"):
        route(x, router, None, EPS, 5, True)
    with pytest.raises(ValueError, match=r"x must be \[T, 32\]"):
        route(x[:, :16], router, None, EPS, 2, True)
    with pytest.raises(TypeError, match=r"x is torch\.float32, router is torch\.float16"):
        route(x, router.half(), None, EPS, 2, True)
