"""Resolution of device and dtype `auto`, and refused values."""

import pytest
import torch

from worker_svc.device import device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("has_cuda", "expected"), [(False, CPU), (True, CUDA)])
def test_auto_takes_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert device.resolve_device("auto") == expected
    assert device.resolve_device("cpu") == CPU


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        device.resolve_device("cuda")
    with pytest.raises(ValueError, match="'tpu'"):
        device.resolve_device("tpu")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_on_cpu_is_bfloat16_only_in_hardware(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert device.resolve_dtype("auto", CPU, "float16") == expected


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float32", torch.bfloat16),
    ],
)
def test_auto_on_cuda_is_the_checkpoints_type(checkpoint: str, expected: torch.dtype) -> None:
    assert device.resolve_dtype("auto", CUDA, checkpoint) == expected


def test_a_named_type_is_taken_and_an_unknown_one_refused() -> None:
    assert device.resolve_dtype("float16", CPU, "float32") == torch.float16
    with pytest.raises(ValueError, match="'int8'"):
        device.resolve_dtype("int8", CPU, "float32")
    with pytest.raises(ValueError, match=r"checkpoint.*'float8_e4m3fn'"):
        device.resolve_dtype("auto", CUDA, "float8_e4m3fn")
