"""Linear layer for few rows, with each fused operation, against float32."""

import pytest
import torch
from torch.nn import functional as F

from kernels import reference
from kernels.comm.all_reduce import receive
from kernels.comm.inboxes import EMPTY_BYTE, Inboxes
from kernels.gemm.linear import linear, pays
from tests.pairs import pairwise

SHAPES = [(1, 40, 96), (1, 50, 1100), (3, 40, 96), (5, 50, 1100), (17, 24, 64), (32, 16, 2600)]
FUSED = [
    "plain",
    "bias",
    "residual",
    "norm",
    "gated",
    "norm gated",
    "norm gelu gated",
    "norm bias residual",
]
SIZES = [(4096, 1024), (6144, 1024), (1024, 3072), (4096, 12288)]
EPS = 1e-6


def check(shape, fused, dtype, device, assert_close):
    m, n, k = shape
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device) * k**-0.5
    norm_weight, bias = torch.randn(k, device=device), torch.randn(n, device=device)
    gated = "gated" in fused
    options = {
        "bias": bias if "bias" in fused else None,
        "norm_weight": norm_weight if "norm" in fused else None,
        "residual": torch.randn(m, n, device=device) if "residual" in fused else None,
    }
    x, weight = x.to(dtype), weight.to(dtype)
    options = {name: None if t is None else t.to(dtype) for name, t in options.items()}

    y = x.float()
    if options["norm_weight"] is not None:
        y = reference.rms_norm(y, options["norm_weight"].float(), EPS)
    y = F.linear(y, weight.float())
    if gated:
        y = (reference.gelu_and_mul if "gelu" in fused else reference.silu_and_mul)(y)
    for added in (options["bias"], options["residual"]):
        if added is not None:
            y = y + added.float()
    assert_close(linear(x, weight, eps=EPS, gated=gated, gelu="gelu" in fused, **options), y)


@pytest.mark.parametrize(
    ("shape", "fused", "dtype"), pairwise(SHAPES, FUSED, [torch.float32, torch.float16])
)
def test_fused_neighbours_change_only_the_number_of_launches(
    shape, fused, dtype, device, assert_close
):
    check(shape, fused, dtype, device, assert_close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("m", [1, 3])
def test_peers_get_the_product_for_the_sum_over_ranks(m, dtype, device, assert_close):
    size, n, k, num_bytes = 2, 50, 96, 1 << 10
    memory = torch.full((size, 1, size, num_bytes), EMPTY_BYTE, dtype=torch.uint8, device=device)
    addresses = torch.tensor([part.data_ptr() for part in memory], device=device)
    ranks = [Inboxes(addresses, rank, size, num_bytes, num_slots=1) for rank in range(size)]
    xs, weights = torch.randn(size, m, k, device=device), torch.randn(size, n, k, device=device)
    xs, weights = xs.to(dtype), weights.to(dtype)
    parts = [
        linear(x, weight, inboxes=own) for x, weight, own in zip(xs, weights, ranks, strict=True)
    ]
    for part, own in zip(parts, ranks, strict=True):
        assert torch.equal(receive(part, own, 0)[0], reference.all_reduce(parts, None, None, 0)[0])
    assert_close(parts[0], xs[0].float() @ weights[0].float().T)
    with pytest.raises(ValueError, match="an inbox 16"):
        linear(xs[0], weights[0], inboxes=Inboxes(addresses, 0, size, 16, num_slots=1))


def test_it_is_chosen_for_one_row_and_for_small_layers_only():
    assert pays(1, 151936, 1024)
    assert pays(8, 6144, 1024)
    assert not pays(8, 24576, 4096)
    assert not pays(17, 1024, 1024)


def test_wrong_arguments_are_refused_by_name(device):
    x, weight = torch.randn(2, 64, device=device), torch.randn(32, 64, device=device)
    with pytest.raises(ValueError, match="33 rows"):
        linear(torch.randn(33, 64, device=device), weight)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[N, 64\]"):
        linear(x, weight.T)
    with pytest.raises(ValueError, match="a gated product has none"):
        linear(x, weight, torch.randn(32, device=device), gated=True)
    with pytest.raises(ValueError, match=r"residual must be contiguous \[2, 32\]"):
        linear(x, weight, residual=x)
    with pytest.raises(TypeError, match=r"weight is torch\.float16"):
        linear(x, weight.half())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size", "fused"), pairwise([1, 2, 8, 16, 32], SIZES, FUSED))
def test_real_sizes_in_bfloat16(rows, size, fused, device, assert_close):
    check((rows, *size), fused, torch.bfloat16, device, assert_close)


@pytest.mark.gpu
def test_a_chain_in_a_graph_waits_for_every_link(device, assert_close):
    weights = [torch.randn(1024, 1024, device=device).bfloat16() / 32 for _ in range(40)]
    norm = torch.ones(1024, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, 1024, device=device).bfloat16()

    def chain():
        y = x
        for weight in weights:
            y = linear(y, weight, norm_weight=norm, eps=EPS)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        x.copy_(torch.randn(1, 1024))
        graph.replay()
        overlapped = out.clone()
        y = x
        for weight in weights:
            y = linear(y, weight, norm_weight=norm, eps=EPS)
            torch.cuda.synchronize()
        assert torch.equal(overlapped, y)
