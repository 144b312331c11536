"""Weights that are widened in registers: half of float32's bytes, float32's arithmetic."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN, Steps, make_prompts, save
from worker_svc.models import Decoder, cpu_weights, load_model
from worker_svc.models.cpu_weights import activation_dtype, pack

CPU = torch.device("cpu")
NARROW = [torch.bfloat16, torch.float16]
WEIGHTS = {
    "ordinary": 1.0,
    "above float16": 1e5,
    "below float16": 1e-9,
    "zero": 0.0,
}


@pytest.fixture(autouse=True)
def no_narrow_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies nothing but float32, and no compiled kernels."""
    monkeypatch.setattr(cpu_weights, "cpu_multiplies", lambda _: False)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")
    if not cpu_weights._has_fbgemm():
        pytest.skip("this torch has no FBGEMM")


def weight_and_inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(45, 37).to(dtype), torch.randn(rows, 37)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("bias", [None, torch.arange(45.0)])
def test_the_product_is_float32s(dtype: torch.dtype, rows: int, bias: Tensor | None) -> None:
    weight, x = weight_and_inputs(rows, dtype)
    multiply = pack(weight, None if bias is None else bias.to(dtype))
    assert multiply is not None
    y = multiply(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.linear(x, weight.float(), bias), atol=1e-5, rtol=1e-5)
    assert multiply(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("scale", WEIGHTS.values(), ids=WEIGHTS)
def test_one_row_of_any_size_does_not_spoil_the_product(scale: float) -> None:
    weight, x = weight_and_inputs(5, torch.bfloat16)
    weight[3] *= scale
    multiply = pack(weight, None)
    assert multiply is not None
    expected = F.linear(x, weight.float())
    torch.testing.assert_close(multiply(x), expected, atol=1e-12 + 1e-5 * scale, rtol=1e-4)
    torch.testing.assert_close(multiply(x)[:, 3], expected[:, 3], atol=0, rtol=1e-3)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_depends_on_no_other_row(dtype: torch.dtype) -> None:
    weight, x = weight_and_inputs(16, dtype)
    multiply = pack(weight, None)
    assert multiply is not None
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


def test_hardware_that_multiplies_a_type_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [activation_dtype(dtype, CPU) for dtype in NARROW] == [torch.float32] * 2
    assert activation_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(cpu_weights, "cpu_multiplies", lambda _: True)
    monkeypatch.setattr(cpu_weights, "_onednn_packs", lambda _: True)
    assert [activation_dtype(dtype, CPU) for dtype in NARROW] == NARROW


def logits(model: Decoder, *schedule: int) -> Tensor:
    (prompt,) = make_prompts(sum(schedule))
    steps = Steps(model, [prompt])
    return torch.cat([steps.run({0: count})[0] for count in schedule])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_a_model_differs_from_float32_by_its_stored_values_alone(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    # The checkpoint has no values but those that the type has.
    save(tmp_path, name)
    path = tmp_path / "model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(path).items()}, path)
    ours = load_model(tmp_path, dtype, CPU, MAX_MODEL_LEN)
    exact = load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)
    assert ours.attention_backend == "torch"
    expected = logits(exact, 40)
    bound = 2 * torch.finfo(dtype).eps  # keys and values are rounded
    for schedule in ((40,), (17, 16, 7), (30, *[1] * 10)):
        error = logits(ours, *schedule) - expected
        assert error.norm() <= bound * expected.norm(), schedule
