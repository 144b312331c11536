"""Fused layers with tuned GEMM algorithms: the rows that use them, and equal results."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_kind import AttentionKind
from kernels.gemm.cublas_lt import GemmKind
from worker_svc.models.fused import FusedLayer, FusedMlp
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear

HIDDEN, WIDTH, INNER, EPS = 32, 48, 40, 1e-5
ROWS = 20  # more than the Triton kernels take
DTYPE = torch.float32
QKV = GemmKind(WIDTH, HIDDEN, DTYPE, adds=False)
GATE_UP = GemmKind(2 * INNER, HIDDEN, DTYPE, adds=False)


class Quick:
    """A GEMM of exactly `ROWS` rows in place of the library's, which counts its calls."""

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self.num_calls = 0

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        assert len(x) == ROWS
        self.num_calls += 1
        output = x @ weight.T
        return out.copy_(out + output if self._adds else output)


def gemms(*kinds: GemmKind) -> dict[GemmKind, Any]:
    return {kind: {ROWS: Quick(kind.adds)} for kind in kinds}


def behind(k: int, adds: bool) -> GemmKind:
    return GemmKind(HIDDEN, k, DTYPE, adds)


@pytest.fixture
def layer() -> FusedLayer:
    """A layer with biases in qkv and o."""
    torch.manual_seed(0)
    ones = torch.ones(HIDDEN)
    return FusedLayer(
        kind=AttentionKind(1.0),
        qkv=NormedLinear(torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH), ones, False),
        cos_sin=torch.empty(0, 2),
        qk_norms=None,
        o=FusedLinear(torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN)),
        feed=FusedMlp(
            NormedLinear(torch.randn(2 * INNER, HIDDEN), None, ones, True),
            FusedLinear(torch.randn(HIDDEN, INNER), None),
        ),
    )


def test_a_bias_that_is_not_in_the_residual_leaves_a_product_to_torch(layer: FusedLayer) -> None:
    alone = [kind for kind, _ in layer.weights(adds=True)]
    assert alone == [behind(WIDTH, True), GATE_UP, behind(INNER, True)]
    of_a_rank = [kind for kind, _ in layer.weights(adds=False)]
    assert of_a_rank == [GATE_UP, behind(INNER, False)]


def test_weights_are_told_with_what_multiplies_them(layer: FusedLayer) -> None:
    found = dict(layer.weights(adds=True))
    assert found[GATE_UP] is layer.feed.gate_up.weight
    assert found[behind(WIDTH, True)] is layer.o.weight
    assert found[behind(INNER, True)] is layer.feed.down.weight


def test_chosen_products_serve_their_numbers_of_rows_and_torch_the_others(
    layer: FusedLayer,
) -> None:
    kinds = (behind(WIDTH, True), GATE_UP, behind(INNER, True))
    chosen = gemms(*kinds)
    changed = layer.tuned(True, chosen)
    for num_rows in (ROWS, ROWS + 1):
        x = torch.randn(num_rows, HIDDEN)
        wide, inner = torch.randn(num_rows, WIDTH), torch.randn(num_rows, INNER)
        torch.testing.assert_close(
            changed.o.added(wide, x.clone()), x + F.linear(wide, layer.o.weight, layer.o.bias)
        )
        torch.testing.assert_close(
            changed.feed.down.added(inner, x.clone()), x + inner @ layer.feed.down.weight.T
        )
        gate_up, rms_of = changed.feed.gate_up(Hidden(x), EPS)
        torch.testing.assert_close(gate_up, x @ layer.feed.gate_up.weight.T)
        assert rms_of is x
        qkv, _ = changed.qkv(Hidden(x), EPS)
        torch.testing.assert_close(qkv, layer.qkv(Hidden(x), EPS)[0])
    assert [chosen[kind][ROWS].num_calls for kind in kinds] == [1, 1, 1]


def test_a_rank_adds_its_part_to_nothing(layer: FusedLayer) -> None:
    """With an all-reduce after the GEMM, the GEMM must not add to the output."""
    kind = behind(INNER, False)
    chosen = gemms(kind, behind(INNER, True), QKV)
    changed = layer.tuned(False, chosen)
    x = torch.randn(ROWS, INNER)
    torch.testing.assert_close(changed.feed.down(x), x @ layer.feed.down.weight.T)
    assert chosen[kind][ROWS].num_calls == 1
    assert chosen[behind(INNER, True)][ROWS].num_calls == 0
    assert changed.o.gemms == {}
    assert changed.qkv.gemms == {}


@pytest.mark.parametrize(("has_o", "has_down"), [(True, False), (False, True)])
def test_a_product_that_is_normed_is_added_to_nothing(
    layer: FusedLayer, has_o: bool, has_down: bool
) -> None:
    ones = torch.ones(HIDDEN)
    layer = replace(layer, output_norms=(ones if has_o else None, ones if has_down else None))
    kinds = [kind for kind, _ in layer.weights(adds=True)]
    assert (behind(WIDTH, True) in kinds) is not has_o  # its bias leaves it to torch
    assert (behind(INNER, True) in kinds) is not has_down
    adding, alone = gemms(behind(INNER, True)), gemms(behind(INNER, False))
    changed = layer.tuned(True, adding | alone)
    x = torch.randn(ROWS, INNER)
    if has_down:
        torch.testing.assert_close(changed.feed.down(x), x @ layer.feed.down.weight.T)
        assert alone[behind(INNER, False)][ROWS].num_calls == 1
    else:
        changed.feed.down.added(x, torch.zeros(ROWS, HIDDEN))
        assert adding[behind(INNER, True)][ROWS].num_calls == 1
