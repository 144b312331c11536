"""Fused experts, interpreted, against the torch layer: weights of each kind, norms, residuals."""

import os

import pytest
import torch
from torch import Tensor

from kernels.expert_clamp import Clamp
from kernels.quantized.scaled import ScaledWeight
from tests.worker_svc.mxfp4_checkpoints import random_codes
from worker_svc.models.experts import ExpertForm, Experts
from worker_svc.models.families import gpt_oss as gpt_oss_family
from worker_svc.models.fused_gemms import Hidden
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import WeightRows
from worker_svc.models.spec import Activation, MoeSpec, RouterSpec, SharedSpec, TensorNames

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="Triton does not interpret here",
)
CPU, HIDDEN, EPS = torch.device("cpu"), 64, 1e-6
SPEC = MoeSpec(RouterSpec(5, 2, renormalizes=True), intermediate_size=96)
NAMES = TensorNames()


def filled(kind: str, spec: MoeSpec = SPEC) -> Experts:
    """Experts with weights in 8 bits, by channel or by block, or plain: the same for a kind."""
    form = ExpertForm.NUMBERS if kind == "plain" else ExpertForm.EMPTY
    experts = Experts(HIDDEN, spec, torch.float32, CPU, form)
    generator = torch.Generator().manual_seed(0)
    for name, to in experts.destinations("mlp", NAMES):
        values = torch.randn(to.shape, generator=generator) * to.shape[-1] ** -0.5
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


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("count", [2, 20])
def test_experts_of_every_token_are_those_of_the_torch_layer(count: int, is_gated: bool) -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    rule = RouterSpec(5, 2, renormalizes=True, is_sigmoid=True, has_bias=True, scale=1.5)
    spec = MoeSpec(rule, 32, SharedSpec(3, is_gated))
    x, before = rows(count), norm()
    expected = x + filled("plain", spec)(before(x))
    fused = FusedExperts.of(before, filled("plain", spec))
    torch.testing.assert_close(fused(Hidden(x), EPS, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["channel", "block"])
@pytest.mark.parametrize("count", [2, 20])
def test_an_expert_of_every_token_has_8_bits_as_the_others(count: int, kind: str) -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    spec = MoeSpec(RouterSpec(5, 2, renormalizes=True), 96, SharedSpec(1, is_gated=True))
    x, before = rows(count), norm()
    expected = x + filled(kind, spec)(before(x))
    fused = FusedExperts.of(before, filled(kind, spec))
    assert fused.down.is_fp8 and fused.down.shape == (6, HIDDEN, 96)
    torch.testing.assert_close(fused(Hidden(x), EPS, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [Activation.RELU2, Activation.GELU_TANH])
@pytest.mark.parametrize("count", [1, 20])
def test_experts_with_other_activations_are_those_of_the_torch_layer(
    count: int, activation: Activation
) -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    spec = MoeSpec(RouterSpec(5, 2, renormalizes=True), 48, activation=activation)
    x, before = rows(count), norm()
    expected = x + filled("plain", spec)(before(x))
    fused = FusedExperts.of(before, filled("plain", spec))
    torch.testing.assert_close(fused(Hidden(x), EPS, x), expected, rtol=1e-4, atol=1e-5)


def test_the_router_has_the_type_of_rows_where_norms_are_in_float32() -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    experts = Experts(HIDDEN, SPEC, torch.bfloat16, CPU)
    for _, to in experts.destinations("mlp", NAMES):
        to.copy_(torch.randn(to.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    before = RMSNorm(HIDDEN, EPS, torch.bfloat16, CPU, offset=1.0)
    before.weight.fill_(1.0)
    x = rows(3).bfloat16()
    expected = experts(before(x))
    found = FusedExperts.of(before, experts)(Hidden(x, before(x)), EPS, None)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def gpt_oss(form: ExpertForm) -> Experts:
    """Experts of gpt-oss, of which those out of codes are the same in each form."""
    router = RouterSpec(5, 2, renormalizes=True, has_logit_bias=True)
    spec = MoeSpec(router, 96, bias=True, clamp=Clamp(0.7, 1.702))
    experts = Experts(HIDDEN, spec, torch.float32, CPU, form)
    generator = torch.Generator().manual_seed(0)
    for name, to in experts.destinations("mlp", gpt_oss_family.NAMES):
        blocks, scales = random_codes((5, 192 if "gate" in name else 64, 32), len(name))
        if name.endswith("blocks"):
            to.copy_(blocks.expand(to.shape[0], to.shape[1], to.shape[2], 16).contiguous())
        elif name.endswith("scales"):
            to.copy_(scales.expand(to.shape).contiguous())
        else:
            to.copy_(torch.randn(to.shape, generator=generator) * 0.2)
    return experts


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("form", [ExpertForm.NUMBERS, ExpertForm.CODES])
def test_experts_of_gpt_oss_are_those_of_the_torch_layer(form: ExpertForm, count: int) -> None:
    from worker_svc.models.fused_experts import FusedExperts  # noqa: PLC0415 - Triton

    x, before = rows(count), norm()
    is_codes = form is ExpertForm.CODES
    expected = x + gpt_oss(ExpertForm.WIDENED if is_codes else form)(before(x))
    fused = FusedExperts.of(before, gpt_oss(form))
    assert fused.gate_up.is_mxfp4 is is_codes
    torch.testing.assert_close(fused(Hidden(x), EPS, x), expected, rtol=1e-4, atol=1e-5)
    one_of_ranks = gpt_oss(form)
    one_of_ranks.drop_output_bias()
    assert FusedExperts.of(before, one_of_ranks).down.bias is None


def test_experts_that_no_kernel_widens_are_told(caplog: pytest.LogCaptureFixture) -> None:
    filled("one is plain").stacked()
    assert "quantization: experts [5, 192, 64] are kept as float numbers" in caplog.text
