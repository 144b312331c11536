"""Decoding of the block tables of several KV groups, and every frame refused for them."""

from dataclasses import replace

import pytest

from pagewire.v1 import worker_pb2
from tests.worker_svc.protocol.test_codec import LIMITS, frame
from wire.columns import pack
from worker_svc.protocol.codec import decode_step
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import BadStep

# Group 0, one of twice as many tokens per block, and one whose tokens read 20 tokens.
GROUPS = replace(LIMITS, kv_groups=(LayerGroup(16), LayerGroup(32), LayerGroup(16, window=20)))


def sequence(**fields: object) -> worker_pb2.NewSequence:
    defaults: dict[str, object] = {
        "slot": 5,
        "token_ids": pack(range(50)),
        "num_prompt_tokens": 50,
        "num_computed_tokens": 36,
        "block_ids": pack([1, 2, 3]),
        # Position 36 reads from 17 on: the first block of 16 tokens is not read.
        "group_block_ids": [pack([4, 5]), pack([0, 6, 7])],
    }
    return worker_pb2.NewSequence(**(defaults | fields))


def appended(group: int, slots: list[int], block_ids: list[int]) -> worker_pb2.AppendedBlocks:
    return worker_pb2.AppendedBlocks(group=group, slots=pack(slots), block_ids=pack(block_ids))


def test_the_tables_of_all_groups_arrive() -> None:
    step = decode_step(
        frame(
            step_id=1,
            new_sequences=[sequence()],
            appended_slots=pack([5]),
            appended_block_ids=pack([8]),
            appended_to_groups=[appended(1, [5, 0], [9, 10]), appended(2, [5], [11])],
        ),
        GROUPS,
    )
    (new,) = step.new_sequences
    assert new.block_ids.tolist() == [1, 2, 3]
    assert [ids.tolist() for ids in new.group_block_ids] == [[4, 5], [0, 6, 7]]
    found = [(one.group, one.slots.tolist(), one.block_ids.tolist()) for one in
             step.appended_to_groups]  # fmt: skip
    assert found == [(1, [5, 0], [9, 10]), (2, [5], [11])]


def test_a_window_of_group_0_has_null_blocks_before_it() -> None:
    limits = replace(LIMITS, kv_groups=(LayerGroup(16, window=20),))
    new = sequence(block_ids=pack([0, 2, 3]), group_block_ids=[])
    step = decode_step(frame(step_id=1, new_sequences=[new]), limits)
    assert step.new_sequences[0].block_ids.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"group_block_ids": []}, r"group_block_ids: 0 tables after .*, of 3 kv_groups"),
        ({"group_block_ids": [pack([4])] * 3}, r"group_block_ids: 3 tables"),
        ({"block_ids": pack([0, 2, 3])}, r"\]\.block_ids: block 0 is not in 1..49"),
        (
            {"group_block_ids": [pack([0, 5]), pack([0, 6, 7])]},
            r"group_block_ids\[0\]: block 0 is not in 1..49",
        ),
        (
            {"group_block_ids": [pack([4, 5]), pack([0, 0, 7])]},
            r"group_block_ids\[1\]: block 0 is not in 1..49",
        ),
        (
            {"group_block_ids": [pack([4, 5]), pack([-1, 6, 7])]},
            r"group_block_ids\[1\]: block -1 is not in 0..49",
        ),
        (
            {"group_block_ids": [pack([4, 5, 6]), pack([0, 6, 7])]},
            r"group_block_ids\[0\]: 3 blocks, 2 hold max_model_len",
        ),
        ({"group_block_ids": [b"123", pack([])]}, r"group_block_ids\[0\]"),
    ],
)
def test_a_sequence_with_wrong_tables_is_refused_by_name(
    fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(BadStep, match=problem):
        decode_step(frame(step_id=1, new_sequences=[sequence(**fields)]), GROUPS)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([appended(0, [1], [1])], "group 0 after 0, of 3 kv_groups"),
        ([appended(3, [1], [1])], "group 3 after 0"),
        ([appended(2, [1], [1]), appended(1, [1], [2])], "group 1 after 2"),
        ([appended(1, [1], [1]), appended(1, [1], [2])], "group 1 after 1"),
        ([appended(1, [8], [1])], r"appended_to_groups.slots: slot 8 is not in 0..7"),
        ([appended(1, [1], [0])], r"appended_to_groups.block_ids: block 0 is not in 1..49"),
        ([appended(1, [1, 2], [1])], "1 blocks for 2 appended_to_groups.slots"),
    ],
)
def test_wrongly_appended_blocks_are_refused_by_name(
    given: list[worker_pb2.AppendedBlocks], problem: str
) -> None:
    with pytest.raises(BadStep, match=f"appended_to_groups.*{problem}|{problem}"):
        decode_step(frame(step_id=1, appended_to_groups=given), GROUPS)


def test_a_worker_with_one_group_refuses_tables_of_others() -> None:
    with pytest.raises(BadStep, match="1 tables after that of group 0, of 1 kv_groups"):
        decode_step(frame(step_id=1, new_sequences=[sequence(group_block_ids=[pack([4])])]), LIMITS)
    with pytest.raises(BadStep, match="group 1 after 0, of 1 kv_groups"):
        decode_step(frame(step_id=1, appended_to_groups=[appended(1, [1], [1])]), LIMITS)
