"""Routing kernels: experts and weights of rows, rows of experts, whatever the rows hold."""

import math

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.experts.router import Router, Routing, route

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
    _, routing = route(x, Router(router, 2, True), None, EPS)
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
    found, routing = route(x, Router(router, shape[3], renormalizes), None, EPS)
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
    normed, routing = route(x, Router(router, shape[3], True), norm, EPS)
    expected = reference.rms_norm(x, norm, EPS)
    assert_close(normed, expected)
    weights, chosen = reference.choose_experts(expected @ router.T, shape[3], True)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)


@pytest.mark.parametrize("gates_shared", [False, True])
@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("shape", [(3, 64, 12, 4), (40, 64, 7, 3)])
def test_sigmoids_choose_with_a_bias_and_weigh_without(
    shape, renormalizes, gates_shared, device, assert_close
):
    """Next to them each row has experts that all have."""
    rows, hidden, experts, top_k = shape
    x, weight = made((rows, hidden, experts + gates_shared, top_k), torch.float32, device)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)).to(device)
    rule = Router(weight, top_k, renormalizes, bias, True, 2.5, 2, gates_shared)
    _, routing = route(x, rule, None, EPS)
    logits = x @ weight.T
    chosen_by = {"is_sigmoid": True, "bias": bias, "scale": 2.5}
    found = reference.choose_experts(logits[:, :experts], top_k, renormalizes, **chosen_by)
    assert not torch.equal(found[1], reference.choose_experts(logits[:, :experts], top_k, True)[1])
    gate = logits[:, -1] if gates_shared else None
    weights, chosen = reference.with_shared_experts(*found, experts, 2, gate)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)
    assert routing.counts[-2:].tolist() == [rows, rows]
    assert_lists_agree(routing)


# Experts, groups, groups that are kept, experts of a row.
GROUPS = [(12, 3, 2, 4), (20, 4, 1, 5), (16, 4, 2, 6), (32, 8, 4, 8), (6, 3, 3, 2)]


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("shape", GROUPS)
def test_experts_are_those_of_the_best_groups(shape, is_sigmoid, device, assert_close):
    experts, groups, kept, top_k = shape
    x, weight = made((9, 64, experts, top_k), torch.float32, device)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)).to(device) * 0.3
    rule = {"is_sigmoid": is_sigmoid, "bias": bias, "scale": 2.5}
    router = Router(weight, top_k, True, **rule, num_shared=1, num_groups=groups, kept_groups=kept)
    _, routing = route(x, router, None, EPS)
    logits = x @ weight.T
    found = reference.choose_experts(logits, top_k, True, **rule, groups=(groups, kept))
    anywhere = reference.choose_experts(logits, top_k, True, **rule)
    assert groups == kept or not torch.equal(found[1], anywhere[1])
    weights, chosen = reference.with_shared_experts(*found, experts, 1, None)
    assert torch.equal(routing.experts.long(), chosen)
    assert_close(routing.weights, weights)
    assert_lists_agree(routing)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_rows_of_padding_have_experts_of_the_first_groups_or_of_any(value, device):
    x, weight = made((3, 64, 20, 8), torch.float32, device)
    x[1] = value
    router = Router(weight, 8, False, is_sigmoid=True, num_groups=5, kept_groups=2)
    _, routing = route(x, router, None, EPS)
    assert_lists_agree(routing)
    assert all(len({index // 4 for index in row}) == 2 for row in routing.experts.tolist())


def test_of_equal_groups_the_first_are_kept_and_of_equal_experts_too(device):
    x, weight = torch.ones(1, 16, device=device), torch.ones(12, 16, device=device)
    bias = torch.tensor([0.0] * 8 + [1.0] * 4, device=device)  # the last group is the best one
    router = Router(weight, 6, True, bias, True, num_groups=3, kept_groups=2)
    assert route(x, router, None, EPS)[1].experts.tolist() == [[8, 9, 10, 11, 0, 1]]


def test_what_is_added_to_a_sum_counts_where_scores_are_small(device, assert_close):
    x, weight = made((3, 64, 12, 4), torch.float32, device)
    bias = torch.full((12,), -8.0, device=device)  # of the logits: each score is about 3e-4
    rule = Router(weight, 4, True, is_sigmoid=True, logit_bias=bias, epsilon=1e-3)
    _, routing = route(x, rule, None, EPS)
    logits = x @ weight.T + bias
    weights, _ = reference.choose_experts(logits, 4, True, is_sigmoid=True, epsilon=1e-3)
    assert (weights.sum(-1) < 0.9).all()
    assert_close(routing.weights, weights)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_rows_of_padding_have_experts_that_are_there(value, device):
    x, router = made((5, 64, 6, 4), torch.float32, device)
    x[1] = value
    _, routing = route(x, Router(router, 4, False), None, EPS)
    assert_lists_agree(routing)
    assert set(routing.experts.flatten().tolist()) <= set(range(6))


def test_of_equal_logits_the_first_wins(device):
    x, router = torch.ones(1, 16, device=device), torch.ones(9, 16, device=device)
    _, routing = route(x, Router(router, 3, True), None, EPS)
    assert routing.experts.tolist() == [[0, 1, 2]]
    assert routing.weights.tolist() == [pytest.approx([1 / 3] * 3)]


def test_rows_may_be_a_slice_of_wider_ones(device):
    wide, router = made((6, 96, 7, 2), torch.float32, device)
    rule = Router(router[:, :64].contiguous(), 2, True)
    _, apart = route(wide[:, 16:80], rule, None, EPS)
    _, whole = route(wide[:, 16:80].contiguous(), rule, None, EPS)
    assert torch.equal(apart.experts, whole.experts)


def test_wrong_arguments_are_refused_by_name(device):
    x, router = made((2, 32, 4, 2), torch.float32, device)
    with pytest.raises(ValueError, match="top_k: 5 of 4 experts"):
        route(x, Router(router, 5, True), None, EPS)
    for groups, top_k in ((3, 1), (4, 1), (2, 3)):
        with pytest.raises(ValueError, match=f"{top_k} of 4 experts, of 1 of {groups} groups"):
            route(x, Router(router, top_k, True, num_groups=groups), None, EPS)
    with pytest.raises(ValueError, match=r"x must be \[T, 32\]"):
        route(x[:, :16], Router(router, 2, True), None, EPS)
    with pytest.raises(TypeError, match=r"x is torch\.float32, router is torch\.float16"):
        route(x, Router(router.half(), 2, True), None, EPS)
    with pytest.raises(ValueError, match=r"bias \(3,\) for 4 experts"):
        route(x, Router(router, 2, True, torch.zeros(3, device=device)), None, EPS)
