"""Tiled linear layer for up to 32 rows, with each fused operation, against float32."""

import pytest
import torch
from torch.nn import functional as F

from kernels import reference
from kernels.gemm.tiled_linear import arrivals, pays, tiled_linear
from tests.pairs import pairwise

# Rows, columns, K: columns of less than a tile, one tile, several; K split into 1, 2, 4.
SHAPES = [(17, 64, 128), (3, 40, 256), (32, 130, 512), (16, 64, 640), (31, 100, 128)]
FUSED = ["plain", "residual", "gated", "gated divided", "gelu gated divided"]
SIZES = [(4096, 1024), (6144, 1024), (1024, 3072), (24576, 4096), (4096, 12288)]
EPS = 1e-6


def check(shape, fused, dtype, device, assert_close, calls=1):
    m, n, k = shape
    gated = "gated" in fused
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device) * k**-0.5
    residual = torch.randn(m, n, device=device).to(dtype) if fused == "residual" else None
    x, weight = x.to(dtype), weight.to(dtype)

    y = F.linear(x.float(), weight.float())
    if "divided" in fused:
        y = y * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    if gated:
        y = (reference.gelu_and_mul if "gelu" in fused else reference.silu_and_mul)(y)
    if residual is not None:
        y = y + residual.float()
    arrived = arrivals(weight)
    for _ in range(calls):  # the first call resets the counters
        how = {"gated": gated, "gelu": "gelu" in fused, "divided": "divided" in fused, "eps": EPS}
        found = tiled_linear(x, weight, arrived, residual=residual, **how)
        assert_close(found, y)
    assert not arrived.any()


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_neighbours_change_only_the_number_of_launches(shape, fused, device, assert_close):
    check(shape, fused, torch.float16, device, assert_close, calls=2)


def test_rows_of_x_may_lie_apart(device, assert_close):
    wide = torch.randn(20, 300, device=device).half()
    weight = torch.randn(64, 128, device=device).half()
    x = wide[:, 100:228]
    assert_close(tiled_linear(x, weight, arrivals(weight)), x.float() @ weight.float().T)


def test_what_it_cannot_multiply_is_known_beforehand(device):
    half = torch.zeros(4096, 256, dtype=torch.float16, device=device)
    assert not pays(half.float())
    assert not pays(half[:, :100])
    assert not pays(half[:1024])


def test_wrong_arguments_are_refused_by_name(device):
    x = torch.randn(20, 128, device=device).half()
    weight = torch.randn(32, 128, device=device).half()
    arrived = arrivals(weight)
    with pytest.raises(ValueError, match="33 rows"):
        tiled_linear(x.new_zeros(33, 128), weight, arrived)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[N, 128\]"):
        tiled_linear(x, weight.T, arrived)
    with pytest.raises(ValueError, match="multiple of 128, got 100"):
        tiled_linear(x[:, :100], weight.new_zeros(32, 100), arrived)
    with pytest.raises(ValueError, match=r"residual must be contiguous \[20, 32\]"):
        tiled_linear(x, weight, arrived, residual=x)
    with pytest.raises(TypeError, match=r"weight is torch\.float32"):
        tiled_linear(x, weight.float(), arrived)
    with pytest.raises(ValueError, match="0 counters for 1 tiles"):
        tiled_linear(x, weight, arrived[:0])
    long = x.new_zeros(20, 256)
    with pytest.raises(ValueError, match="rows of 256 for 32 columns are cut"):
        tiled_linear(long, weight.new_zeros(32, 256), arrived, divided=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size", "fused"), pairwise([3, 9, 16, 17, 32], SIZES, FUSED))
def test_real_sizes_in_bfloat16(rows, size, fused, device, assert_close):
    check((rows, *size), fused, torch.bfloat16, device, assert_close, calls=3)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 4096])  # a small layer, which overlaps others, and not
def test_a_chain_in_a_graph_waits_for_every_link(width, device):
    weights = [torch.randn(width, width, device=device).bfloat16() / 32 for _ in range(20)]
    counters = [arrivals(weight) for weight in weights]
    x = torch.randn(32, width, device=device).bfloat16()

    def chain(meanwhile):
        y = x
        for weight, arrived in zip(weights, counters, strict=True):
            y = tiled_linear(y, weight, arrived)
            meanwhile()
        return y

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        x.copy_(torch.randn(32, width))
        graph.replay()
        overlapped = out.clone()
        assert torch.equal(overlapped, chain(torch.cuda.synchronize))
