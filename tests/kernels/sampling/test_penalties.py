"""Penalties by the kernel, compared with those by torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.sampling.penalties import penalize
from worker_svc.sampling.logits_processors import History, Penalties, penalize_by_torch

VOCAB_SIZE, LENGTH, NUM_SLOTS, NUM_ROWS = 4099, 2600, 6, 9
CASES = {  # (prompt, known tokens, distinct tokens) of each penalized row
    "one": [(3, 9, 5)],
    "an empty output, and an empty prompt": [(7, 7, 3), (0, 6, 2)],
    "around a chunk": [(1, 1023, 40), (1024, 1024, 9), (1000, 1025, 4000), (2, 2049, 1)],
    "a whole row": [(5, 2600, 300)],
}


def drawn(case: str) -> tuple[torch.Tensor, Penalties]:
    """Logits [R, V], and penalties of some rows; what follows the known tokens is arbitrary."""
    random = np.random.default_rng(len(case))
    tokens = random.integers(0, VOCAB_SIZE, (NUM_SLOTS, LENGTH)).astype(np.int32)
    lengths = CASES[case]
    slots = random.permutation(NUM_SLOTS)[: len(lengths)]
    for slot, (_, num_tokens, distinct) in zip(slots, lengths, strict=True):
        words = random.choice(VOCAB_SIZE, distinct, replace=False)
        tokens[slot, :num_tokens] = random.choice(words, num_tokens)
    num_prompt, num_tokens = (np.array([pair[i] for pair in lengths]) for i in (0, 1))
    history = History(torch.from_numpy(tokens), slots, num_prompt, num_tokens)
    rows = random.permutation(NUM_ROWS)[: len(lengths)]
    presence, frequency = random.uniform(-2, 2, (2, len(lengths))).astype(np.float32)
    repetition = random.uniform(0.5, 2, len(lengths)).astype(np.float32)
    logits = torch.from_numpy(random.normal(0, 4, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32))
    return logits, Penalties(rows, presence, frequency, repetition, history)


def by_kernel(logits: torch.Tensor, penalties: Penalties, device: torch.device) -> torch.Tensor:
    history, found = penalties.history, logits.clone().to(device)
    columns = penalties.rows, history.slots, history.num_prompt, history.num_tokens
    factors = penalties.presence, penalties.frequency, penalties.repetition
    penalize(
        found,
        history.token_rows.to(device),
        torch.from_numpy(np.stack(columns)).to(device),
        torch.from_numpy(np.stack(factors)).to(device),
        int(history.num_tokens.max()),
    )
    return found.cpu()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_torch_to_the_bit(case: str, device: torch.device) -> None:
    logits, penalties = drawn(case)
    found, before = by_kernel(logits, penalties, device), logits.clone()
    penalize_by_torch(logits, penalties)
    assert torch.equal(found, logits)
    assert not torch.equal(before, logits)


def test_a_row_without_tokens_stays_as_it_is(device: torch.device) -> None:
    logits, penalties = drawn("a whole row")
    none = History(penalties.history.token_rows, *[np.zeros(1, dtype=np.int64)] * 3)
    assert torch.equal(by_kernel(logits, replace(penalties, history=none), device), logits)


def test_a_program_without_a_row_changes_nothing(device: torch.device) -> None:
    logits, penalties = drawn("a whole row")
    none = replace(penalties, rows=np.array([-1]))
    assert torch.equal(by_kernel(logits, none, device), logits)


def test_other_types_are_refused(device: torch.device) -> None:
    logits = torch.zeros((1, 8), dtype=torch.bfloat16, device=device)
    tokens = torch.zeros((1, 4), dtype=torch.int32, device=device)
    rows, factors = torch.zeros((4, 1), dtype=torch.int64), torch.zeros((3, 1))
    with pytest.raises(TypeError, match="logits must be float32"):
        penalize(logits, tokens, rows.to(device), factors.to(device), 1)
    with pytest.raises(TypeError, match="token_rows must be int32"):
        penalize(logits.float(), tokens.long(), rows.to(device), factors.to(device), 1)
