"""Bytes that other programs write, word for word."""

import pytest
import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight
from tests.worker_svc import quantized_checkpoints
from worker_svc.quantization.awq import AwqScheme
from worker_svc.quantization.float8 import Float8Scheme
from worker_svc.quantization.gptq import GptqScheme
from worker_svc.quantization.integers import Int8Scheme, PackedScheme
from worker_svc.quantization.scheme import RankCut, Scheme


def read(scheme: Scheme, shape: tuple[int, int], **tensors: Tensor) -> Tensor:
    cut = RankCut(shape, range(shape[0]), range(shape[1]))
    assert {name: spec.shape for name, spec in scheme.tensors(*shape).items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    weight = scheme.read(tensors, cut)
    assert isinstance(weight, GroupedWeight | ScaledWeight)
    return weight.dequantized()


def int32(*words: int) -> Tensor:
    return torch.tensor(words, dtype=torch.int32)


def test_a_packed_row() -> None:
    values = read(
        PackedScheme(4, None, is_symmetric=True, has_order=False),
        (1, 8),
        weight_packed=int32(-22444272)[:, None],
        weight_scale=torch.ones(1, 1, dtype=torch.bfloat16),
        weight_shape=torch.tensor([1, 8]),
    )
    assert values.tolist() == [[-8, -7, -1, 0, 1, 2, 6, 7]]


@pytest.mark.parametrize(("offset", "zeros"), [(1, 2004318071), (0, -2004318072)])
def test_gptq_counts_zeros_from_one_or_from_nought(offset: int, zeros: int) -> None:
    values = read(
        GptqScheme(4, 8, desc_act=False, zero_offset=offset),
        (8, 8),
        qweight=int32(*[0x76543210] * 8)[None],
        qzeros=int32(zeros)[None],
        scales=torch.ones(1, 8, dtype=torch.float16),
        g_idx=torch.zeros(8, dtype=torch.int32),
    )
    assert values.tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]] * 8


def test_awq_has_an_order_of_outputs_of_its_own() -> None:
    values = read(
        AwqScheme(8),
        (8, 8),
        qweight=int32(*[1966171168] * 8)[:, None],
        qzeros=int32(0)[None],
        scales=torch.ones(1, 8, dtype=torch.float16),
    )
    assert values.tolist() == [[float(n)] * 8 for n in range(8)]


def test_eight_bit_floats_times_a_scale_that_is_called_an_inverse() -> None:
    codes = torch.tensor([[0x38, 0xB8, 0x7E, 0x08], [0x01, 0x38, 0x38, 0x38]], dtype=torch.uint8)
    values = read(
        Float8Scheme((1, 2), "weight_scale_inv"),
        (2, 4),
        weight=codes.view(torch.float8_e4m3fn),
        weight_scale_inv=torch.tensor([[1.0, 2.0], [4.0, 0.5]]),
    )
    assert values.tolist() == [[1, -1, 896, 2**-5], [2**-7, 4, 0.5, 0.5]]


def test_signed_bytes() -> None:
    values = read(
        Int8Scheme(by_channel=True, is_symmetric=False),
        (2, 3),
        weight=torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8),
        weight_scale=torch.tensor([[0.5], [2.0]]),
        weight_zero_point=torch.tensor([[-128], [1]], dtype=torch.int8),
    )
    assert values.tolist() == [[0, 64, 127.5], [0, 2, 4]]


def test_the_writer_of_the_tests_writes_the_same_words() -> None:
    ascending = torch.arange(8)[None]
    assert quantized_checkpoints.words(ascending, 4, 1).tolist() == [[0x76543210]]
    order = torch.tensor(quantized_checkpoints.AWQ_ORDER)
    assert quantized_checkpoints.words(ascending[:, order], 4, 1).tolist() == [[1966171168]]
