"""Rows of logits that keep what their masks allow: by the kernel, and by torch."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.sampling.restrict_rows import restrict_rows

NAN, INFINITY = float("nan"), float("inf")
NUM_ROWS = 9
NONE, ALL = 0, 1  # lines of masks, and others that allow a part


def drawn(vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Logits [R, V], rows, masks_of_rows and was_finite [N], masks [G, W]; rows of every kind."""
    random = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(random.normal(0, 4, (NUM_ROWS, vocab_size)).astype(np.float32))
    num_words = -(-vocab_size // 32)
    masks = random.integers(-(2**31), 2**31, (5, num_words)).astype(np.int32)
    masks[NONE], masks[ALL] = 0, -1
    masks[2, :-1] = 0  # the last tokens alone
    rows = torch.tensor([7, 0, 3, 8, 1, 5, 2, 6])
    of_rows = torch.tensor([3, -1, NONE, ALL, 4, -1, 2, -1])
    was_finite = torch.ones(len(rows), dtype=torch.bool)
    was_finite[4] = False
    logits[5, vocab_size // 2] = NAN
    logits[6] = -INFINITY
    logits[8, 3] = -INFINITY
    return logits, rows, of_rows, was_finite, torch.from_numpy(masks)


@pytest.mark.parametrize("vocab_size", [128, 8192, 16390])
def test_rows_are_those_of_torch(vocab_size: int, device: torch.device) -> None:
    logits, *rest = drawn(vocab_size)
    found = logits.clone().to(device)
    has_choice = restrict_rows(found, *(one.to(device) for one in rest)).cpu()
    expected = logits.clone()
    assert torch.equal(has_choice, reference.restrict_rows(expected, *rest))
    assert has_choice.tolist() == [True, True, False, True, True, True, True, False]
    found, is_bad = found.cpu(), expected.isnan().any(1)
    assert torch.equal(found.isnan().any(1), is_bad)
    assert torch.equal(found[~is_bad], expected[~is_bad])
    assert is_bad.nonzero().flatten().tolist() == [1, 3, 5, 6]


def test_rows_that_nothing_changed_stay_as_they_are(device: torch.device) -> None:
    logits, rows, of_rows, was_finite, masks = (one.to(device) for one in drawn(128))
    of_rows, was_finite[:] = torch.full_like(of_rows, -2), False
    before = logits.clone()
    assert restrict_rows(logits, rows.int(), of_rows.int(), was_finite, masks).all()
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0))


def test_a_token_after_the_end_of_its_mask_is_not_allowed(device: torch.device) -> None:
    logits = torch.zeros((1, 70), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    masks = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    assert restrict_rows(logits, zero, zero, zero == 0, masks).tolist() == [True]
    assert (logits[0] == 0).nonzero().flatten().tolist() == list(range(64))


def test_arguments_of_another_kind_are_refused() -> None:
    logits, rows, of_rows, was_finite, masks = drawn(128)
    for wrong in (
        (logits.half(), rows, of_rows, was_finite, masks),
        (logits, rows.float(), of_rows, was_finite, masks),
        (logits, rows, of_rows, was_finite, masks.long()),
    ):
        with pytest.raises(TypeError):
            restrict_rows(*wrong)
    with pytest.raises(ValueError, match="8 rows, 7 of masks"):
        restrict_rows(logits, rows, of_rows[1:], was_finite, masks)
