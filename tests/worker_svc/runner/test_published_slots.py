"""Published examples of cache slots and sequence boundaries, as the inputs of a step."""

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.test_batch_state import LIMITS, column, sequence
from worker_svc.protocol.step import Limits, NewSequence, StepInput
from worker_svc.runner import inputs
from worker_svc.runner.batch_state import BatchState
from worker_svc.runner.inputs import ModelInputs
from worker_svc.sampling.grammars import Grammars

OF_16 = Limits(
    num_blocks=100,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=1000,
)


def built(limits: Limits, *new: NewSequence) -> ModelInputs:
    """The inputs of a step that computes all tokens of new sequences that are not computed."""
    state = BatchState(limits, torch.device("cpu"), Grammars(limits.vocab_size))
    scheduled = [len(each.token_ids) - each.num_computed_tokens for each in new]
    slots = column(*(each.slot for each in new))
    step = StepInput(1, new_sequences=new, slots=slots, num_scheduled=column(*scheduled))
    staged = state.stage(step)
    state.write(staged)
    return inputs.build(state, staged.rows)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "slots"),
    [
        (8, [12, 13], [*range(48, 56)]),
        (7, [20, 25], [80, 81, 82, 83, 100, 101, 102]),
    ],
)
def test_tokens_go_to_the_published_slots(
    num_tokens: int, blocks: list[int], slots: list[int]
) -> None:
    assert LIMITS.block_size == 4
    found = built(LIMITS, sequence(0, num_tokens, blocks))
    assert found.attention.slot_mapping.tolist() == slots


def test_position_35_of_the_published_table_is_slot_131() -> None:
    """A decode row: the last token that is known, in block 8, which is the third of the table."""
    found = built(OF_16, sequence(0, 36, [3, 5, 8], num_computed_tokens=35))
    assert found.positions.tolist() == [35]
    assert found.attention.slot_mapping.tolist() == [131]
    assert found.attention.context_lens.tolist() == [36]


def test_two_prompts_have_the_published_boundaries() -> None:
    found = built(LIMITS, sequence(0, 8, [12, 13]), sequence(1, 7, [20, 25]))
    assert found.attention.cu_seqlens_q.tolist() == [0, 8, 15]
    assert (found.attention.max_seqlen_q, found.attention.max_context_len) == (8, 8)
    assert found.positions.tolist() == [*range(8), *range(7)]
    assert found.logit_rows is not None and found.logit_rows.tolist() == [7, 14]


def test_after_a_hit_queries_are_fewer_than_keys() -> None:
    """Four of eight tokens are cached: four queries at positions 4 to 7, over a context of 8."""
    tokens = np.arange(8, dtype=np.int32)
    cached = sequence(0, 8, [12, 13], num_computed_tokens=4, token_ids=tokens)
    found = built(LIMITS, cached)
    assert found.positions.tolist() == [4, 5, 6, 7]
    assert found.attention.slot_mapping.tolist() == [52, 53, 54, 55]
    assert found.attention.cu_seqlens_q.tolist() == [0, 4]
    assert found.attention.context_lens.tolist() == [8]
