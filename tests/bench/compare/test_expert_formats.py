"""Roundings of the comparison of formats are the nearest numbers that a format has."""

import torch

from bench.compare import expert_formats


def test_fp4_numbers_are_kept_and_others_go_to_the_nearest() -> None:
    row = torch.tensor(
        [6, -6, 0.5, -1.5, 0, 0.2, 0.3, 2.4, -2.6, 3.4, 3.6, -4.9, 5.1, 7.9] + [0.0] * 18
    )
    found = expert_formats.by_32(row[None])[0]
    expected = [6, -6, 0.5, -1.5, 0, 0, 0.5, 2, -3, 3, 4, -4, 6, 6]
    assert found.tolist() == expected + [0.0] * 18
    assert torch.equal(expert_formats.by_32(row[None] * 2**-9), found[None] * 2**-9)


def test_a_block_of_fp8_has_one_scale() -> None:
    weight = torch.randn(256, 256)
    weight[0, 0] = 4e6  # by which its block is scaled, and no other
    found = expert_formats.by_block(weight)
    assert found[0, 0] == 4e6
    assert found[:128, :128].count_nonzero() == 1  # all others are less than half a step
    other = weight[128:, :128]
    assert (found[128:, :128] - other).abs().max() < 2**-4 * other.abs().max()


def test_errors_grow_as_bits_fall() -> None:
    found = expert_formats.measure(hidden=128, inner=128, tokens=8)
    outputs = [of_outputs for _, of_outputs in found.values()]
    assert outputs[0] < outputs[1] < outputs[3] and outputs[0] < outputs[2] < outputs[3]
    assert max(outputs[1:3]) < 0.08 and outputs[3] < 0.3
