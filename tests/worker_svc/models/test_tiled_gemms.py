"""Selection of the GEMM kernel by number of rows, for weights that suit the tiled kernel."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gemm.tiled_linear import arrivals, tiled_linear
from worker_svc.models import fused_gemms
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear

K, N, EPS = 128, 192, 1e-5


@pytest.fixture
def tiled_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the numbers of rows that the tiled kernel was called with."""
    seen: list[int] = []

    def noting(x: Tensor, *others: Tensor, **options: object) -> Tensor:
        seen.append(len(x))
        return tiled_linear(x, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_gemms, "tiled_linear", noting)
    # Otherwise the kernel for few rows takes a weight this small for up to 16 rows.
    monkeypatch.setattr(fused_gemms.small_linear, "pays", lambda m, n, k: m == 1)
    return seen


def close(found: Tensor, want: Tensor) -> bool:
    return bool((found.double() - want.double()).norm() < 4e-3 * want.double().norm())


def plain(linear: FusedLinear, x: Tensor) -> Tensor:
    return linear(x)


def added(linear: FusedLinear, x: Tensor) -> Tensor:
    return linear.added(x, torch.ones(len(x), N, dtype=x.dtype))


@pytest.mark.parametrize("call", [plain, added])
def test_three_to_32_rows_are_the_kernels_and_others_are_not(
    call: Callable[[FusedLinear, Tensor], Tensor], tiled_rows: list[int]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(N, K).half()
    linear = FusedLinear(weight, None, arrived=arrivals(weight))
    for num_rows in (2, 3, 20, 32, 33):
        x = torch.randn(num_rows, K).half()
        want = F.linear(x.float(), weight.float()) + (call is added)
        assert close(call(linear, x), want)
    assert tiled_rows == [3, 20, 32]


def test_a_norm_and_an_activation_come_along(tiled_rows: list[int]) -> None:
    torch.manual_seed(0)
    weight, ones = torch.randn(N, K).half(), torch.ones(K).half()
    linear = NormedLinear(weight, None, ones, is_divisible=True, arrived=arrivals(weight))
    x = torch.randn(20, K).half()
    rms = (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    gate, up = F.linear(x.float() / rms, weight.float()).chunk(2, -1)
    assert linear.norms(20)
    assert close(linear.gated(Hidden(x), EPS), F.silu(gate) * up)
    gelu = F.gelu(gate, approximate="tanh")
    assert close(linear.gated(Hidden(x), EPS, gelu=True), gelu * up)
    # Without an activation the caller divides.
    found, rms_of = linear(Hidden(x), EPS)
    assert rms_of is x
    assert close(found, F.linear(x.float(), weight.float()))
    assert tiled_rows == [20, 20, 20]
