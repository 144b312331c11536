"""C kernels of experts against their reference, for each instruction set and each dtype."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.library import Library, PackedExperts, PackedLinear
from kernels.expert_clamp import Clamp
from tests.kernels.cpu.cpu_cases import COMBINATIONS, drawn_groups, randn, require
from tests.worker_svc.mxfp4_checkpoints import meaning, random_codes
from worker_svc.quantization.mxfp4 import rearranged, separated

NUM_EXPERTS, TOP_K = 9, 3
CLAMP = Clamp(0.7, 1.702)
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Sizes = tuple[int, int]  # hidden, inner
Layer = tuple[PackedLinear, Callable[[Tensor], Tensor]]


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


def act_of(clamp: Clamp | None) -> Callable[[Tensor], Tensor]:
    """The activation by the reference."""
    if clamp is None:
        return reference.silu_and_mul
    return lambda x: reference.clamped_and_mul(x, clamp)


def choices(rows: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of rows: the first has them all but one, the last none has."""
    logits = randn(torch.float32, rows, NUM_EXPERTS, seed=7)
    logits[:, -1] = -10
    return reference.choose_experts(logits, TOP_K, renormalizes=True)


def plain(library: Library, outputs: int, inputs: int, seed: int) -> Layer:
    """A layer of float numbers with a bias, packed and by the reference."""
    weight = randn(library.dtype, outputs, inputs, seed=seed) / inputs**0.5
    bias = randn(library.dtype, outputs, seed=seed + 1)
    return library.pack(weight, bias), linear(weight, bias)


def codes(library: Library, outputs: int, inputs: int, seed: int) -> Layer:
    """Experts in MXFP4."""
    blocks, scales = random_codes((1, outputs, inputs), seed)
    bias = randn(library.dtype, outputs, seed=seed + 1)
    packed = library.pack_mxfp4(separated(rearranged(blocks[0], scales[0])), scales[0], bias)
    return packed, linear(meaning(blocks[0], scales[0]), bias)


def integers(library: Library, outputs: int, inputs: int, seed: int) -> Layer:
    """Experts of integers of 4 bits; all have the same ones."""
    weight = drawn_groups((outputs, inputs), 4, 32)
    return library.pack_groups(weight, None), linear(weight.dequantized(), None)


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    wide = weight.double()
    return lambda x: x @ wide.T + (0 if bias is None else bias.double())


def drawn(library: Library, kind: Callable[..., Layer], sizes: Sizes) -> list[list[Layer]]:
    """The two layers of each expert."""
    hidden, inner = sizes
    return [
        [kind(library, 2 * inner, hidden, 10 * index), kind(library, hidden, inner, 10 * index + 5)]
        for index in range(NUM_EXPERTS)
    ]


def packed_experts(layers: list[list[Layer]], clamp: Clamp | None) -> PackedExperts:
    gate_ups, downs = ([expert[at][0] for expert in layers] for at in range(2))
    return PackedExperts(gate_ups, downs, clamp)


@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["swiglu", "clamped"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(plain, (50, 17)), (plain, (577, 96)), (codes, (96, 32)), (integers, (64, 96))],
)
def test_experts(
    library: Library, kind: Callable[..., Layer], sizes: Sizes, clamp: Clamp | None
) -> None:
    layers = drawn(library, kind, sizes)
    experts = packed_experts(layers, clamp)
    by_reference = [[expert[at][1] for expert in layers] for at in range(2)]
    for rows in (1, 2, 70):
        x, (weights, chosen) = randn(library.dtype, rows, sizes[0]), choices(rows)
        out = library.feed_experts(x, weights, chosen, experts, torch.empty_like(x))
        wanted = reference.feed_experts(x.double(), weights, chosen, *by_reference, act_of(clamp))
        assert (out.double() - wanted).norm() <= BOUNDS[library.dtype] * wanted.norm()


@pytest.mark.parametrize(("kind", "sizes"), [(plain, (50, 17)), (codes, (96, 32))])
def test_a_row_does_not_depend_on_its_neighbours(
    library: Library, kind: Callable[..., Layer], sizes: Sizes
) -> None:
    """Nor on their order: 120 rows are more than a block for some experts, alone there is one."""
    experts = packed_experts(drawn(library, kind, sizes), None)
    x, (weights, chosen) = randn(library.dtype, 400, sizes[0]), choices(400)
    router = randn(torch.float32, NUM_EXPERTS, sizes[0], seed=8)
    logits = library.route(x, router)
    together = library.feed_experts(x, weights, chosen, experts, torch.empty_like(x))
    for begin, count in ((0, 1), (1, 2), (5, 8), (20, 37), (100, 300), (399, 1)):
        rows = slice(begin, begin + count)
        out = torch.empty_like(x[rows])
        library.feed_experts(x[rows], weights[rows], chosen[rows], experts, out)
        assert torch.equal(out, together[rows])
        assert torch.equal(library.route(x[rows], router), logits[rows])


@pytest.mark.parametrize(("size", "count"), [(1, 1), (31, 5), (33, 8), (577, 128)])
def test_routers(library: Library, size: int, count: int) -> None:
    x, weight = randn(library.dtype, 5, size), randn(torch.float32, count, size, seed=1)
    wanted = x.double() @ weight.double().T
    assert (library.route(x, weight) - wanted).norm() <= 1e-6 * wanted.norm()


def test_what_does_not_fit_is_refused(library: Library) -> None:
    layers = drawn(library, plain, (50, 17))
    x, (weights, chosen) = randn(library.dtype, 4, 50), choices(4)
    experts = packed_experts(layers, None)
    with pytest.raises(IndexError, match="among 9 experts"):
        library.feed_experts(x, weights, chosen + 2, experts, torch.empty_like(x))
    with pytest.raises(ValueError, match=r"float64 and torch\.int64"):
        library.feed_experts(x, weights.double(), chosen, experts, torch.empty_like(x))
    layers[2] = [codes(library, 64, 64, 1), codes(library, 64, 32, 2)]
    with pytest.raises(ValueError, match="not all of one form"):
        packed_experts(layers, None)
