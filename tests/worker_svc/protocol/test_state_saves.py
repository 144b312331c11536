"""Columns of snapshots in a step: what arrives, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from pagewire.v1 import worker_pb2
from tests.worker_svc.protocol.test_codec import LIMITS, SAMPLING, frame
from wire.columns import pack
from worker_svc.protocol.codec import decode_step
from worker_svc.protocol.step import BadStep, SaveRequest

WITH_STATES = replace(LIMITS, num_state_snapshots=4)


def saves(**changed: Any) -> dict[str, bytes]:
    columns = {
        "state_save_slots": [5, 5, 0],
        "state_save_positions": [16, 64, 1],
        "state_save_snapshots": [4, 1, 2],
    }
    return {name: pack(values) for name, values in {**columns, **changed}.items()}


def new_sequence(snapshot: int) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        slot=5,
        token_ids=pack([7, 8, 9]),
        num_prompt_tokens=3,
        num_computed_tokens=2,
        block_ids=pack([3]),
        sampling=SAMPLING,
        state_snapshot=snapshot,
    )


def test_snapshots_to_make_and_to_begin_after_arrive() -> None:
    step = decode_step(frame(new_sequences=[new_sequence(3)], **saves()), WITH_STATES)
    assert step.state_saves == (SaveRequest(5, 16, 4), SaveRequest(5, 64, 1), SaveRequest(0, 1, 2))
    assert step.new_sequences[0].state_snapshot == 3


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"state_save_slots": [5, 5, 8]}, "state_save_slots: slot 8 is not in 0..7"),
        ({"state_save_positions": [16, 65, 1]}, "position 65 is not in 1..64"),
        ({"state_save_positions": [16, 0, 1]}, "position 0 is not in 1..64"),
        ({"state_save_positions": [16, 64]}, "state_save_positions: 2 for 3"),
        ({"state_save_snapshots": [4, 1, 0]}, "snapshot 0 is not in 1..4"),
        ({"state_save_snapshots": [4, 1, 5]}, "snapshot 5 is not in 1..4"),
        ({"state_save_snapshots": [4, 1, 4]}, "state_save_snapshots: a snapshot appears twice"),
        ({"state_save_snapshots": [4]}, "state_save_snapshots: 1 for 3"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(changed: Any, problem: str) -> None:
    with pytest.raises(BadStep, match=problem):
        decode_step(frame(**saves(**changed)), WITH_STATES)


def test_a_snapshot_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadStep, match=r"new_sequences\[0\].state_snapshot: 5, there are 4"):
        decode_step(frame(new_sequences=[new_sequence(5)]), WITH_STATES)
    with pytest.raises(BadStep, match=r"state_save_snapshots: snapshot 4 is not in 1\.\.0"):
        decode_step(frame(**saves()), LIMITS)
