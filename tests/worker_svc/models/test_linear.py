"""Linear layers with packed weights against float64."""

import pytest
import torch
import torch.nn.functional as F

from worker_svc.models.linear import Linear

CPU = torch.device("cpu")


def filled(dtype: torch.dtype, *, bias: bool) -> Linear:
    torch.manual_seed(0)
    linear = Linear.empty(40, 24, bias=bias, dtype=dtype, device=CPU)
    linear.weight.copy_(torch.randn(24, 40))
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(24))
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_changes_the_layout_and_not_the_product(
    dtype: torch.dtype, num_rows: int, bias: bool
) -> None:
    linear = filled(dtype, bias=bias)
    x = torch.randn(num_rows, 40).to(dtype)
    double_bias = None if linear.bias is None else linear.bias.double()
    exact = F.linear(x.double(), linear.weight.double(), double_bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    before = linear(x)
    linear.pack()
    for y in (before, linear(x)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, atol=4 * tolerance, rtol=tolerance)


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    linear = filled(torch.float32, bias=False)
    linear.pack()
    x = torch.randn(16, 40)
    alone = torch.cat([linear(row) for row in x.split(1)])
    torch.testing.assert_close(linear(x), alone, atol=1e-5, rtol=1e-5)


def test_a_shared_weight_stays_readable_when_packed() -> None:
    embedding = torch.randn(24, 40)
    before = embedding.clone()
    head = Linear(embedding)
    head.pack()
    x = torch.randn(3, 40)
    torch.testing.assert_close(head(x), x @ before.T, atol=1e-5, rtol=1e-5)
    assert torch.equal(embedding, before)
