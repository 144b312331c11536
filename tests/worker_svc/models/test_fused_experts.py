"""Fused experts, interpreted, against the torch layer: weights of each kind, norms, residuals."""

import os

import pytest
import torch
from torch import Tensor

from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.experts import Experts
from worker_svc.models.fused_gemms import Hidden
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import WeightRows
from worker_svc.models.spec import MoeSpec, TensorNames

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="Triton does not interpret here",
)
CPU, HIDDEN, EPS = torch.device("cpu"), 64, 1e-6
SPEC = MoeSpec(num_experts=5, top_k=2, intermediate_size=96, renormalizes=True)
NAMES = TensorNames()


def filled(kind: str) -> Experts:
    """Experts with weights in 8 bits, by channel or by block, or plain: the same for a kind."""
    experts = Experts(HIDDEN, SPEC, torch.float32, CPU, is_quantized=kind != "plain")
    generator = torch.Generator().manual_seed(0)
    for name, to in experts.destinations("mlp", NAMES):
        values = torch.randn(to.shape, generator=generator) * to.shape[1] ** -0.5
        is_kept = kind == "plain" or (kind == "one is plain" and ".3." in name)
        if is_kept or not isinstance(to, WeightRows):
            to.copy_(values)
        else:
            weight = ScaledWeight.rounded(values)
            to.put_narrow(weight.regrouped(32) if kind == "block" else weight)
    return experts


def norm() -> RMSNorm:
    made = RMSNorm(HIDDEN, EPS, torch.float32, CPU)
    made.weight.copy_(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5)
    return made


def rows(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("kind", ["plain", "channel", "block", "one is plain"])
def test_experts_are_those_of_the_torch_layer(kind: str, count: int) -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    x, before = rows(count), norm()
    expected = x + filled(kind)(before(x))
    fused = FusedExperts.of(before, filled(kind))
    assert (fused.gate_up.scales is not None) is (kind in ("channel", "block"))
    torch.testing.assert_close(fused(Hidden(x), EPS, x), expected, rtol=1e-4, atol=1e-5)
    # A rank norms after its all-reduce, and adds nothing.
    alone = fused(Hidden(x, before(x)), EPS, None)
    torch.testing.assert_close(x + alone, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_no_kernel_widens_are_told(caplog: pytest.LogCaptureFixture) -> None:
    filled("one is plain").stacked()
    assert "quantization: experts [5, 192, 64] are kept as float numbers" in caplog.text
