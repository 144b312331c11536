"""Experts in few bits for few rows, by tensor cores, against what their bits mean."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cluster.expert_rows import ExpertLayout, ExpertRows, FewRowExperts, suits
from kernels.expert_clamp import Clamp
from kernels.experts import router
from kernels.experts.weights import ExpertWeights
from tests.kernels.experts.test_products import Case, in_4_bits, in_8_bits
from tests.worker_svc.mxfp4_checkpoints import meaning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")
# Rows, hidden size, inner size, experts, experts of a row: of gpt-oss, and sizes whose groups fill
# no warp; experts without rows, with one tile of eight rows, and with several.
SHAPES_IN_4_BITS = [
    (1, 2880, 2880, 5, 4),
    (2, 2880, 2880, 5, 4),
    (32, 2880, 2880, 5, 4),
    (1, 32, 160, 8, 3),
    (3, 96, 64, 200, 9),
    (40, 160, 96, 4, 2),
    (23, 64, 1056, 3, 1),
]
# Of Qwen3-30B-A3B and Qwen3.5-35B-A3B, and as above.
SHAPES_IN_8_BITS = [
    (1, 2048, 768, 12, 8),
    (32, 2048, 768, 12, 8),
    (5, 2048, 512, 12, 9),
    (1, 64, 192, 8, 3),
    (3, 192, 64, 200, 9),
    (40, 320, 128, 4, 2),
    (23, 128, 1088, 3, 1),
]


class Coded(Case):
    """A case whose weights are codes; their numbers are kept to compare with."""

    def __init__(self, shape: tuple[int, ...], bits: int = 4, group: int | None = None) -> None:
        super().__init__(shape, torch.bfloat16, DEVICE)
        if bits == 4:
            self.coded_up, self.gate_up = in_4_bits(self.gate_up)
            self.coded_down, self.down = in_4_bits(self.down)
        else:
            self.coded_up, self.coded_down = (
                in_8_bits(self.gate_up, group),
                in_8_bits(self.down, group),
            )
            self.gate_up, self.down = self.coded_up, self.coded_down

    def with_biases(self) -> None:
        """Gives both products biases."""
        for name in ("gate_up", "down"):
            plain = getattr(self, name)
            bias = torch.randn(plain.shape[:2], device=DEVICE).bfloat16()
            setattr(self, name, replace(plain, bias=bias))
        self.coded_up = replace(self.coded_up, bias=self.gate_up.bias)
        self.coded_down = replace(self.coded_down, bias=self.down.bias)

    def found(self, residual: Tensor | None) -> Tensor:
        kernels = FewRowExperts.of(self.coded_up, self.coded_down, self.routing.per_row)
        assert kernels is not None
        inner = kernels.of_gate_up.gated(self.x, self.coded_up, self.routing, self.clamp)
        return kernels.of_down.summed(inner, self.coded_down, self.routing, residual)


def close(found: Tensor, expected: Tensor) -> None:
    """As close as one rounding of the inner values and one of the result allow."""
    assert torch.isfinite(found).all()
    assert (found.float() - expected).abs().max() <= 2**-7 * expected.abs().max()


def grouped(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int | None]]:
    """Each with scales of all columns, and of the most of a few that all rows have more of."""
    found: list[tuple[tuple[int, ...], int | None]] = []
    for shape in shapes:
        fewest = min(shape[1:3])
        found += [
            (shape, group) for group in (None, 128 if fewest > 128 else 64) if (group or 0) < fewest
        ]
    return found


CASES = [(shape, 4, None) for shape in SHAPES_IN_4_BITS]
CASES += [(shape, 8, group) for shape, group in grouped(SHAPES_IN_8_BITS)]


@pytest.mark.parametrize("is_whole", [False, True], ids=["plain", "bias, clamp, residual"])
@pytest.mark.parametrize(("shape", "bits", "group"), CASES)
def test_each_row_is_fed_by_its_experts(
    shape: tuple[int, ...], bits: int, group: int | None, is_whole: bool
) -> None:
    case = Coded(shape, bits, group)
    if is_whole:
        case.with_biases()
        case.clamp = Clamp(7.0, 1.702)
    residual = case.residual if is_whole else None
    close(case.found(residual), case.expected(residual))


@pytest.mark.parametrize(
    ("shape", "group"),
    grouped([*SHAPES_IN_8_BITS[1:], (300, 320, 128, 4, 2), (24, 100, 72, 3, 2)]),
)
def test_pairs_of_8_bits_are_widened_by_groups_of_rows(
    shape: tuple[int, ...], group: int | None
) -> None:
    case = Coded(shape, 8, group)
    close(case.by_groups(case.residual), case.expected(case.residual))


def test_all_rows_of_one_expert_are_in_tiles_of_it() -> None:
    case = Coded((29, 96, 64, 5, 2))
    logits = torch.zeros(5, 96, device=DEVICE).bfloat16()
    _, case.routing = router.route(case.x, router.Router(logits, 2, True), None, 0.0)
    assert case.routing.counts.tolist() == [29, 29, 0, 0, 0]
    close(case.found(None), case.expected(None))


def test_exponents_from_the_least_to_the_largest_that_fits_are_exact() -> None:
    """One column each, so that nothing is added: 2^-127 times a half is no normal bfloat16."""
    case = Coded((1, 32, 32, 2, 1))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(64)[: 2 * 32 * 16]
    for exponent in (0, 1, 100, 127, 128):
        scales = torch.full((2, 32, 1), exponent, dtype=torch.uint8, device=DEVICE)
        down = ExpertWeights.of_codes(codes.view(2, 32, 16).contiguous(), scales)
        case.coded_down = down
        kernels = FewRowExperts.of(case.coded_up, down, 1)
        assert kernels is not None
        expert = int(case.routing.experts[0, 0])
        # As the file of a checkpoint has them: byte j of columns 2 j and 2 j + 1.
        of_expert = down.values[expert].cpu()
        halves = torch.cat((of_expert & 15, of_expert >> 4), -1)
        stored = halves[:, 0::2] | halves[:, 1::2] << 4
        numbers = meaning(stored[:, None], scales[expert].cpu())
        for column in (0, 1, 2, 15, 16, 31):
            x = torch.zeros(1, 32, device=DEVICE, dtype=torch.bfloat16)
            x[0, column] = 1.0
            y = kernels.of_down.summed(x, down, case.routing, None)
            expected = numbers[:, column] * case.routing.weights[0, 0].cpu()
            assert torch.equal(y[0].cpu(), expected.bfloat16()), (exponent, column)


def test_all_bytes_of_8_bits_are_exact() -> None:
    """One column each, so that nothing is added: the least are no normal numbers."""
    case = Coded((1, 64, 256, 2, 1), 8)
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values[values & 0x7F == 0x7F] = 0
    expert, weight = int(case.routing.experts[0, 0]), case.routing.weights[0, 0]
    for column in (0, 1, 2, 3, 15, 16, 63):
        for scale in (2.0**-100, 1.0, 2.0**100):
            down = torch.zeros(2, 256, 64, dtype=torch.uint8, device=DEVICE)
            down[expert, :, column] = values
            scales = torch.full((2, 256, 1), scale, device=DEVICE)
            stored = ExpertWeights(down.view(torch.float8_e4m3fn), scales)
            kernels = ExpertRows(ExpertLayout.of(stored, 1))
            x = torch.zeros(1, 64, device=DEVICE, dtype=torch.bfloat16)
            x[0, column] = 1.0
            y = kernels.summed(x, stored, case.routing, None)
            expected = values.view(torch.float8_e4m3fn).float() * scale * weight
            assert torch.equal(y[0], expected.bfloat16()), (scale, column)


def test_8_bits_it_cannot_widen_are_known_beforehand() -> None:
    case = Coded((1, 64, 64, 2, 1), 8)
    assert suits(case.coded_up, gated=True) and suits(case.coded_down)
    assert not suits(in_8_bits(ExpertWeights(torch.zeros(2, 32, 96, device=DEVICE)), None))
    assert not suits(in_8_bits(ExpertWeights(torch.zeros(2, 32, 64, device=DEVICE)), 32))


def test_what_it_cannot_widen_is_known_beforehand() -> None:
    case = Coded((1, 64, 64, 2, 1))
    assert suits(case.coded_up, gated=True) and not suits(case.gate_up)
    assert case.coded_up.scales is not None
    case.coded_up.scales[1, 3, 0] = 129
    assert not suits(case.coded_up, gated=True)
    narrow, _ = in_4_bits(ExpertWeights(torch.zeros(2, 24, 64, device=DEVICE)))
    assert not suits(narrow)
    assert FewRowExperts.of(case.coded_up, case.coded_down, 1) is None
