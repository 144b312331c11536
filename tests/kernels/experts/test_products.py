"""Products with the weights of experts, for a few rows and by groups, against their meaning."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.expert_clamp import Clamp
from kernels.experts import few_rows, grouped_linear, router
from kernels.experts.grouped_linear import combined
from kernels.experts.router import Routing
from kernels.experts.weights import ExpertWeights
from kernels.quantized.scaled import ScaledWeight
from tests.worker_svc.mxfp4_checkpoints import meaning, random_codes

# Rows, hidden size, inner size, experts, experts of a row. Sizes that no block divides; experts
# without rows; more rows of an expert than a tile has.
SHAPES = [
    (1, 64, 32, 8, 2),
    (2, 48, 80, 5, 3),
    (3, 256, 136, 16, 4),
    (9, 100, 24, 3, 2),
    (40, 64, 72, 4, 2),
    (37, 32, 48, 2, 1),
]


def numbers(weights: ExpertWeights) -> Tensor:
    """[E, N, K] in float32."""
    values, scales = weights.values.float(), weights.scales
    if scales is None:
        return values
    group = weights.group or values.shape[2]
    return values * scales.repeat_interleave(group, 2)[..., : values.shape[2]]


def layers(weights: ExpertWeights) -> list[Callable[[Tensor], Tensor]]:
    """The product of each expert, in float32."""
    biases = [None] * len(weights.values) if weights.bias is None else weights.bias.float()
    pairs = zip(numbers(weights), biases, strict=True)
    return [partial(F.linear, weight=weight, bias=bias) for weight, bias in pairs]


def in_4_bits(weights: ExpertWeights) -> tuple[ExpertWeights, ExpertWeights]:
    """Random codes of the shape, and the numbers that they stand for."""
    num_experts, num_outputs, k = weights.values.shape
    blocks, exponents = random_codes((num_experts, num_outputs, k), seed=k)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [E, N, K / 32, 32]
    low, high = codes.chunk(2, -1)
    packed, device = (low | high << 4).flatten(2), weights.values.device
    numbers = meaning(blocks, exponents).to(device, weights.values.dtype)
    return ExpertWeights.of_codes(packed.to(device), exponents.to(device)), ExpertWeights(numbers)


def in_8_bits(weights: ExpertWeights, group: int | None) -> ExpertWeights:
    """The nearest, with scales by group that differ."""
    k = weights.values.shape[2]
    parts = []
    for each in weights.values:
        whole = ScaledWeight.rounded(each.float())
        fine = whole if group is None else whole.regrouped(group)
        drawn = torch.rand(fine.scales.shape, generator=torch.Generator().manual_seed(k)) + 0.5
        scales = fine.scales * drawn.to(fine.scales.device)
        parts.append(ScaledWeight(fine.values, scales, group or k))
    stacked = ExpertWeights.stacked(parts)
    assert stacked is not None and stacked.group == group
    return stacked


class Case:
    """Rows, weights of experts and a routing."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, spread: float = 1.0
    ) -> None:
        rows, hidden, inner, experts, top_k = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        self.x, self.residual = normal(rows, hidden), normal(rows, hidden)
        self.gate_up = ExpertWeights(normal(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = ExpertWeights(normal(experts, hidden, inner) * inner**-0.5)
        self.clamp: Clamp | None = None
        self.router = normal(experts, hidden) * hidden**-0.5 * spread
        _, self.routing = router.route(self.x, router.Router(self.router, top_k, True), None, 0.0)

    def expected(self, residual: Tensor | None) -> Tensor:
        """[T, hidden] in float32."""
        act = partial(reference.clamped_and_mul, clamp=self.clamp)
        y = reference.feed_experts(
            self.x.float(),
            self.routing.weights,
            self.routing.experts.long(),
            layers(self.gate_up),
            layers(self.down),
            reference.silu_and_mul if self.clamp is None else act,
        )
        return y if residual is None else y + residual.float()

    def by_groups(self, residual: Tensor | None) -> Tensor:
        routing = self.routing
        inner = grouped_linear.grouped_linear(
            self.x, self.gate_up, routing, gated=True, clamp=self.clamp
        )
        y = grouped_linear.grouped_linear(inner, self.down, routing)
        return combined(y, routing, residual)

    def by_pairs(self, residual: Tensor | None) -> Tensor:
        inner = few_rows.gated(self.x, self.gate_up, self.routing, self.clamp)
        return few_rows.summed(inner, self.down, self.routing, residual)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["by_groups", "by_pairs"])
def test_each_row_is_fed_by_its_experts(way, shape, dtype, adds, device, assert_close):
    case = Case(shape, dtype, device)
    residual = case.residual if adds else None
    assert_close(getattr(case, way)(residual), case.expected(residual))


@pytest.mark.parametrize(("way", "rows"), [("by_groups", 20), ("by_pairs", 2)])
def test_rows_have_their_own_experts_and_those_of_every_row(way, rows, device, assert_close):
    case = Case((rows, 64, 48, 5, 2), torch.float32, device)
    rule = router.Router(case.router[:4].contiguous(), 2, True, num_shared=2, gates_shared=True)
    _, case.routing = router.route(case.x, rule, None, 0.0)  # among 3, then 2 of every row
    assert case.routing.counts[3:].tolist() == [rows, rows]
    assert_close(getattr(case, way)(case.residual), case.expected(case.residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize(("way", "rows"), [("by_groups", 9), ("by_pairs", 2)])
def test_weights_in_8_bits_are_the_numbers_that_they_stand_for(
    way, rows, group, dtype, device, assert_close
):
    case = Case((rows, 160, 96, 4, 2), dtype, device)
    case.gate_up, case.down = in_8_bits(case.gate_up, group), in_8_bits(case.down, group)
    assert_close(getattr(case, way)(case.residual), case.expected(case.residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize(("way", "rows"), [("by_groups", 9), ("by_pairs", 2)])
def test_experts_may_have_biases_and_clamp(way, rows, limit, dtype, device, assert_close):
    case = Case((rows, 72, 40, 4, 2), dtype, device)
    case.clamp = None if limit is None else Clamp(limit, 1.702)
    generator = torch.Generator().manual_seed(3)
    for name in ("gate_up", "down"):
        weights = getattr(case, name)
        bias = torch.randn(weights.values.shape[:2], generator=generator).to(weights.values)
        setattr(case, name, replace(weights, bias=bias))
    assert_close(getattr(case, way)(case.residual), case.expected(case.residual))


def test_a_bias_of_another_size_is_refused_by_name():
    with pytest.raises(ValueError, match=r"bias must be \(2, 8\), got \(2, 4\)"):
        ExpertWeights(torch.randn(2, 8, 16), bias=torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("way", "rows"), [("by_groups", 9), ("by_groups", 2), ("by_pairs", 2), ("by_pairs", 1)]
)
def test_weights_in_4_bits_are_the_numbers_that_they_stand_for(
    way, rows, dtype, device, assert_close
):
    """Tiles do not divide the columns here, which are no power of two either."""
    case = Case((rows, 160, 96, 4, 2), dtype, device)
    (gate_up, plain_gate_up), (down, plain_down) = in_4_bits(case.gate_up), in_4_bits(case.down)
    case.gate_up, case.down = plain_gate_up, plain_down
    expected = case.expected(case.residual)
    case.gate_up, case.down = gate_up, down
    assert_close(getattr(case, way)(case.residual), expected)


@pytest.mark.parametrize("exponent", [0, 1, 127, 252])
def test_exponents_at_both_ends_are_powers_of_two(exponent, device):
    """One column each, so that nothing is added: 2^-127 is no normal number, 6 x 2^125 the last."""
    generator = torch.Generator().manual_seed(exponent)
    blocks = torch.randint(256, (2, 16, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.full((2, 16, 2), exponent, dtype=torch.uint8)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    low, high = codes.chunk(2, -1)
    down = ExpertWeights.of_codes((low | high << 4).flatten(2).to(device), scales.to(device))
    experts = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    ones = torch.ones(2, 1, device=device)
    counts = torch.ones(2, dtype=torch.int32, device=device)
    pairs = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32, device=device)
    routing = Routing(experts, ones, counts, pairs)
    for column in (0, 1, 15, 16, 40, 63):
        x = torch.zeros(2, 64, device=device)
        x[:, column] = 1.0
        expected = meaning(blocks, scales)[[1, 0], :, column]
        assert expected.any() and torch.isfinite(expected).all()
        for found in (
            few_rows.summed(x, down, routing, None),
            grouped_linear.grouped_linear(x, down, routing),
        ):
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_weights_in_8_bits_that_are_not_numbers_are_refused_by_their_expert(byte):
    weights = in_8_bits(ExpertWeights(torch.randn(3, 32, 64)), None)
    weights.require_numbers()
    weights.values.view(torch.uint8)[1, 31, 63] = byte
    with pytest.raises(ValueError, match="expert 1 has weights that are not numbers"):
        weights.require_numbers()


def test_groups_that_are_no_tiles_are_not_stacked():
    weight = ScaledWeight.rounded(torch.randn(8, 96))
    assert ExpertWeights.stacked([weight.regrouped(48), weight.regrouped(48)]) is None
    assert ExpertWeights.stacked([weight.regrouped(32), weight]) is None


@pytest.mark.parametrize("rows", [5, 40])
def test_all_rows_may_have_one_expert(rows, device, assert_close):
    """Then other experts have no tile, and this one has several."""
    case = Case((rows, 64, 32, 6, 1), torch.float32, device)
    only = torch.zeros(rows, 64, device=device)
    only[:, 0] = 9.0
    weight = torch.zeros(6, 64, device=device)
    weight[4, 0] = 1.0
    _, case.routing = router.route(only, router.Router(weight, 1, True), None, 0.0)
    assert case.routing.counts.tolist() == [0, 0, 0, 0, rows, 0]
    assert_close(case.by_groups(case.residual), case.expected(case.residual))


@pytest.mark.parametrize(
    ("num_rows", "has_room"), [(8, True), (64, True), (300, True), (2000, True), (300, False)]
)
def test_every_configuration_gives_the_same(num_rows, has_room, device, assert_close, monkeypatch):
    """Configurations for many rows are tried with a few, since programs are interpreted."""
    case = Case((6, 160, 96, 3, 2), torch.float16, device)
    choose = grouped_linear._config
    config = choose(
        num_rows, num_rows / 8, True, 2, is_narrow=False, is_mxfp4=False, has_room=has_room
    )
    monkeypatch.setattr(grouped_linear, "_config", lambda *_, **__: config)
    assert_close(case.by_groups(case.residual), case.expected(case.residual))

    (gate_up, plain_gate_up), (down, plain_down) = in_4_bits(case.gate_up), in_4_bits(case.down)
    case.gate_up, case.down = plain_gate_up, plain_down
    expected = case.expected(case.residual)
    case.gate_up, case.down = gate_up, down
    config = choose(
        num_rows, num_rows / 8, True, 2, is_narrow=True, is_mxfp4=True, has_room=has_room
    )
    assert_close(case.by_groups(case.residual), expected)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_rows_of_nothing_but_padding_do_no_harm(device):
    case = Case((4, 64, 32, 6, 2), torch.float32, device)
    expected = case.by_groups(None)
    case.x[2] = float("nan")
    _, case.routing = router.route(case.x, router.Router(case.router, 2, True), None, 0.0)
    found = case.by_groups(None)
    others = [0, 1, 3]
    assert torch.equal(found[others], expected[others])


def test_wrong_arguments_are_refused_by_name(device):
    case = Case((3, 64, 32, 6, 2), torch.float32, device)
    few = Routing(
        case.routing.experts[:2], case.routing.weights[:2], case.routing.counts, case.routing.pairs
    )
    with pytest.raises(ValueError, match="3 rows of x for 2 rows and 4 pairs"):
        grouped_linear.grouped_linear(case.x, case.gate_up, few)
    for product in (few_rows.gated, grouped_linear.grouped_linear):
        with pytest.raises(ValueError, match=r"x must be \[T, 64\]"):
            product(case.x[:, :32], case.gate_up, case.routing)
        with pytest.raises(TypeError, match=r"x is torch\.float32, weights are torch\.float16"):
            product(case.x, ExpertWeights(case.gate_up.values.half()), case.routing)
    with pytest.raises(TypeError, match="alone have scales"):
        ExpertWeights(case.gate_up.values, torch.ones(6, 64, 1))
    with pytest.raises(ValueError, match="scales must be float32"):
        ExpertWeights(case.gate_up.values.to(torch.float8_e4m3fn), torch.ones(6, 64, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 31, 64, 65, 256, 257, 1024])
def test_real_sizes_in_bfloat16(rows, bits, device, assert_close):
    case = Case((rows, 2048, 768, 128, 8), torch.bfloat16, device, spread=3.0)
    if bits == 8:
        case.gate_up, case.down = in_8_bits(case.gate_up, 128), in_8_bits(case.down, 128)
    assert_close(case.by_groups(case.residual), case.expected(case.residual))
    if few_rows.pays(rows, case.gate_up):
        assert_close(case.by_pairs(case.residual), case.expected(case.residual))
