"""Grants over gRPC: the tokens of single steps, with any cuts; and state hashes."""

import random

import grpc
import numpy as np
import pytest

from pagewire.v1 import types_pb2, worker_pb2
from tests.worker_svc.conftest import Attachment, Worker, make_prompt, make_sequence
from wire.columns import pack, unpack
from wire.state_hash import StateHashes, block_weights, slot_hashes

NUM_STEPS = 40
SAMPLINGS = (
    worker_pb2.RowSampling(top_p=1),
    worker_pb2.RowSampling(top_p=0.9, temperature=0.8, seed=5, logprobs=2),
    worker_pb2.RowSampling(
        top_p=1, temperature=1, seed=9, presence_penalty=0.5, repetition_penalty=1.3,
        min_tokens=12, stop_token_ids=[2, 7],
    ),
)  # fmt: skip
BLOCKS = [list(range(1, 5)), list(range(10, 14)), list(range(20, 24))]


def enter(attachment: Attachment) -> worker_pb2.ModelRunnerOutput:
    """Three sequences with blocks for all their tokens."""
    sequences = [
        make_sequence(slot, make_prompt(10 + slot, slot), BLOCKS[slot], sampling=sampling)
        for slot, sampling in enumerate(SAMPLINGS)
    ]
    attachment.send(new_sequences=sequences, slots=[0, 1, 2], num_scheduled=[10, 11, 12])
    return attachment.receive()


def grant(attachment: Attachment, first: int, num_steps: int, **fields: object) -> None:
    step = worker_pb2.SchedulerOutput(
        step_id=first, granted_steps=num_steps, slots=pack([0, 1, 2]), **fields
    )
    attachment.send_raw(worker_pb2.AttachRequest(step=step))


def essence(output: worker_pb2.ModelRunnerOutput) -> tuple[bytes, bytes, types_pb2.LogprobColumns]:
    assert output.error == ""
    return output.token_ids, output.row_status, output.logprobs


@pytest.mark.parametrize("seed", range(3))
def test_granted_steps_have_the_tokens_of_single_ones(worker: Worker, seed: int) -> None:
    single = worker.attach()
    outputs = [enter(single)]
    for _ in range(NUM_STEPS - 1):
        single.send(slots=[0, 1, 2])
        outputs.append(single.receive())
    single.close()

    rng = random.Random(seed)
    granted = worker.attach()
    found, next_id, num_skipped = [enter(granted)], 2, 0
    while len(found) < NUM_STEPS:
        num_steps = min(rng.randint(1, 9), NUM_STEPS - len(found))
        grant(granted, next_id, num_steps)
        last = next_id + num_steps - 1
        is_cut = rng.random() < 0.5
        if is_cut:
            cut = worker_pb2.Cut(first_step_id=next_id, last_step_id=last)
            granted.send_raw(worker_pb2.AttachRequest(cut=cut))
        expected = range(next_id, last + 1)
        while len(expected) or is_cut:
            response = next(granted.call)
            if response.HasField("skipped"):
                is_cut, expected = False, range(expected.start, response.skipped.first_step_id)
                num_skipped += last + 1 - response.skipped.first_step_id
                continue
            assert response.output.step_id == expected.start
            expected = expected[1:]
            found.append(response.output)
        next_id = last + 1
    granted.close()
    assert [essence(o) for o in found] == [essence(o) for o in outputs]
    assert num_skipped > 0


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        ("granted_steps: 65, max_granted_steps is 64", {"granted_steps": 65}),
        ("granted_steps: slot 2 has too few blocks", {"granted_steps": 53}),
        ("reset: must be empty with granted_steps", {"granted_steps": 2, "reset": True}),
        ("num_scheduled: must be empty", {"granted_steps": 2, "num_scheduled": pack([1, 1, 1])}),
        (
            "new_sequences: must be empty",
            {"granted_steps": 2, "new_sequences": [make_sequence(3, [5], [60])]},
        ),
    ],
)
def test_a_grant_that_cannot_be_kept_is_refused_whole(
    worker: Worker, names: str, fields: dict[str, object]
) -> None:
    attachment = worker.attach()
    enter(attachment)
    step = worker_pb2.SchedulerOutput(step_id=2, slots=pack([0, 1, 2]), **fields)
    attachment.send_raw(worker_pb2.AttachRequest(step=step))
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert names in attachment.call.details()


def test_a_prompt_cannot_be_granted(worker: Worker) -> None:
    attachment = worker.attach()
    sequence = make_sequence(0, make_prompt(10), [1, 2])
    attachment.send(new_sequences=[sequence], slots=[0], num_scheduled=[4])
    attachment.receive()
    step = worker_pb2.SchedulerOutput(step_id=2, slots=pack([0]), granted_steps=2)
    attachment.send_raw(worker_pb2.AttachRequest(step=step))
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert "granted_steps: slot 0 does not decode" in attachment.call.details()


def expected_hashes(
    num_computed: list[int], tables: list[list[int]], token_ids: list[int]
) -> list[int]:
    """State hashes by the definition, entry by entry."""
    weights = [int(weight) for weight in block_weights(8)]
    sums = [
        sum(block * weight for block, weight in zip(table, weights, strict=False)) % 2**64
        for table in tables
    ]
    hashes = slot_hashes(
        np.arange(len(tables)),
        np.array(sums, dtype=np.uint64),
        np.array(num_computed),
        np.array(token_ids),
    )
    return hashes.tolist()


def state_of(output: worker_pb2.ModelRunnerOutput) -> StateHashes:
    return StateHashes.unpack(output.state.slots, output.state.hashes)


def test_a_step_that_wants_the_state_gets_every_live_slots_hash(worker: Worker) -> None:
    attachment = worker.attach()
    first = unpack(enter(attachment).token_ids).tolist()
    attachment.send(slots=[0, 2], wants_state=True, appended_slots=[1], appended_block_ids=[33])
    output = attachment.receive()
    state = state_of(output)
    assert state.slots.tolist() == [0, 1, 2]
    tables = [BLOCKS[0], [*BLOCKS[1], 33], BLOCKS[2]]
    idle = make_prompt(11, 1)[-1]  # slot 1 was idle: last token of its prompt
    assert state.hashes.tolist() == expected_hashes(
        [11, 11, 13], tables, [first[0], idle, first[2]]
    )
    attachment.send(slots=[0, 2])
    assert not attachment.receive().HasField("state")


def test_a_grant_tells_the_state_after_its_first_step(worker: Worker) -> None:
    attachment = worker.attach()
    first = unpack(enter(attachment).token_ids).tolist()
    grant(attachment, 2, 3, wants_state=True)
    outputs = [attachment.receive() for _ in range(3)]
    assert [output.HasField("state") for output in outputs] == [True, False, False]
    assert state_of(outputs[0]).hashes.tolist() == expected_hashes([11, 12, 13], BLOCKS, first)


@pytest.mark.parametrize("change", ["num_computed", "table", "token_ids", "swapped"])
def test_any_difference_gives_another_hash(change: str) -> None:
    same: dict[str, list] = {"num_computed": [5], "tables": [[3, 4, 5]], "token_ids": [7]}
    other = (
        same
        | {
            "num_computed": {"num_computed": [6]},
            "table": {"tables": [[3, 4, 6]]},
            "token_ids": {"token_ids": [8]},
            "swapped": {"tables": [[4, 3, 5]]},
        }[change]
    )
    assert expected_hashes(**same) != expected_hashes(**other)
