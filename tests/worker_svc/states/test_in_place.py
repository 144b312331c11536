"""Steps whose states kernels update in place: which tokens go with which rows."""

import torch
from torch import Tensor

from kernels.recurrent.segments import CHUNK
from worker_svc.attention.batch import AttentionBatch, StateCut
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.slots import SlotStates, StateKey, StateShape

SHAPES = {StateKey(0, "recurrent"): StateShape((2,), torch.float32)}
NUM_SLOTS = 5


def batch_of(
    lengths: list[int],
    slots: Tensor | None,
    device: torch.device,
    cuts: tuple[StateCut, ...] = (),
) -> AttentionBatch:
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return AttentionBatch(
        slot_mapping=ends,
        block_tables=ends,
        context_lens=ends[1:],
        cu_seqlens_q=ends,
        max_seqlen_q=max(lengths),
        max_context_len=max(lengths),
        slots=slots,
        state_cuts=cuts,
    )


def test_nothing_waits_for_the_device() -> None:
    meta = torch.device("meta")  # whose numbers nothing can read
    states = SlotStates(SHAPES, NUM_SLOTS, meta, 2)
    slots = torch.zeros(3, dtype=torch.int64, device=meta)
    for lengths in ([1, 1, 1], [1, 70, 2]):
        positions = torch.zeros(sum(lengths), dtype=torch.int64, device=meta)
        InPlaceStep(states, batch_of(lengths, slots, meta), positions).finish()


def test_a_rehearsal_has_the_rows_of_padding_and_leaves_all_places_as_they_are() -> None:
    cpu = torch.device("cpu")
    states = SlotStates(SHAPES, NUM_SLOTS, cpu)
    slots, padding = torch.arange(NUM_SLOTS), torch.tensor([-1, -1])
    of_slots, of_padding = states.rows_before(slots), states.rows_after(padding)
    for lengths in ([1, 1], [1, 3]):
        step = InPlaceStep(states, batch_of(lengths, None, cpu), torch.arange(sum(lengths)))
        (segments,) = step.waves
        step.finish()
        assert torch.equal(segments.before, states.rows_before(padding))
        assert torch.equal(segments.after, of_padding)
        assert torch.equal(states.rows_before(slots), of_slots)


def test_a_cut_sequence_goes_on_from_the_row_of_its_snapshot() -> None:
    cpu = torch.device("cpu")
    states = SlotStates(SHAPES, NUM_SLOTS, cpu, num_snapshots=3)
    lengths, slots = [1, 70, 5, 130], torch.tensor([3, 0, 2, 1])
    cuts = (StateCut(1, 64, 2), StateCut(3, 10, 1), StateCut(3, 100, 3))
    positions = torch.cat([torch.arange(7, 8), *map(torch.arange, lengths[1:])])
    step = InPlaceStep(states, batch_of(lengths, slots, cpu, cuts), positions)
    before, after = states.rows_before(slots).tolist(), states.rows_after(slots).tolist()
    one, two, three = (states.snapshot_row(number) for number in (1, 2, 3))
    found = []
    for wave in step.waves:
        bounds = wave.bounds
        assert bounds is not None
        columns = bounds.begin, bounds.end, wave.before, wave.after, wave.is_first
        # Otherwise a kernel would be compiled once more.
        assert not any(each.data_ptr() % 16 for each in (*columns, bounds.of_chunk))
        found.append(list(zip(*(each.tolist() for each in columns), strict=True)))
    assert found == [
        [
            (0, 1, before[0], after[0], False),
            (1, 65, before[1], two, True),
            (71, 76, before[2], after[2], True),
            (76, 86, before[3], one, True),
        ],
        [(65, 71, two, after[1], False), (86, 176, one, three, False)],
        [(176, 206, three, after[3], False)],
    ]


def test_each_chunk_of_each_segment_has_a_number_of_its_own() -> None:
    cpu = torch.device("cpu")
    states = SlotStates(SHAPES, NUM_SLOTS, cpu)
    for lengths in ([1, 64, 1, 200], [63, 65, 64, 1, 1], [130]):
        slots = torch.arange(len(lengths))
        step = InPlaceStep(states, batch_of(lengths, slots, cpu), torch.arange(sum(lengths)))
        bounds = step.waves[0].bounds
        assert bounds is not None
        chunks = []
        for number, segment in enumerate(bounds.of_chunk.tolist()):
            begin, end = int(bounds.begin[segment]), int(bounds.end[segment])
            first = begin + (number - begin // CHUNK - segment) * CHUNK
            if begin <= first < end:
                chunks.append((segment, first))
        assert chunks == [
            (segment, first)
            for segment in range(len(lengths))
            for first in range(sum(lengths[:segment]), sum(lengths[: segment + 1]), CHUNK)
        ]
