"""Adds the pictures of sequences in slots to the inputs of a step."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.pictures import SequencePictures, StepPictures
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.inputs import ModelInputs


def with_pictures(
    model_inputs: ModelInputs, staged: Staged, *, sees_both_ways: bool
) -> ModelInputs:
    """The inputs of a step with the pictures of its rows; as they are if no row has any."""
    slots = staged.rows.slots
    if not staged.table.columns["has_pictures"][slots].any():
        return model_inputs
    pictures = _step_pictures(staged, model_inputs.positions, sees_both_ways=sees_both_ways)

    def pictured(batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, pictures=pictures, parts=None)

    batch = model_inputs.attention
    batch = replace(pictured(batch), others=tuple(map(pictured, batch.others)))
    return replace(model_inputs, attention=batch, last=None)


def _step_pictures(staged: Staged, positions: Tensor, *, sees_both_ways: bool) -> StepPictures:
    rows, step = staged.rows, _Step(len(positions))
    first = 0
    for slot, begin, count in zip(
        rows.slots.tolist(), rows.num_computed.tolist(), rows.num_scheduled.tolist(), strict=True
    ):
        occupant = staged.table.occupants[slot]
        assert occupant is not None  # rows are of sequences
        step.add(occupant.pictures, first, begin, begin + count)
        first += count
    return step.pictures(positions.device, sees_both_ways=sees_both_ways)


class _Step:
    """Collects the pictures of a step's rows."""

    def __init__(self, num_tokens: int) -> None:
        self._rotations = np.zeros((3, num_tokens), dtype=np.int64)
        self._rows = np.full(num_tokens, -1, dtype=np.int64)
        self._rotates = False
        self._ranges: list[tuple[int, int]] = []
        self._embeddings: list[Tensor] = []
        self._levels: list[tuple[Tensor, ...]] = []
        self._num_placed = 0

    def add(self, pictures: SequencePictures | None, first: int, begin: int, end: int) -> None:
        """Adds a row, whose tokens from `begin` to `end` are those from `first` on of the step."""
        of_row = slice(first, first + end - begin)
        if pictures is None:
            self._rotations[:, of_row] = np.arange(begin, end)
            return
        self._rotates |= pictures.rotations is not None
        self._rotations[:, of_row] = pictures.rotations_of(begin, end)
        for index, encoded in enumerate(pictures.encoded):
            since = pictures.begins[index]
            from_, to = max(begin, since), min(end, pictures.ends[index])
            if from_ >= to:
                continue
            where = first + from_ - begin, first + to - begin
            self._ranges.append(where)
            self._rows[slice(*where)] = self._num_placed + np.arange(to - from_)
            part = slice(from_ - since, to - since)
            self._embeddings.append(encoded.embeddings[part])
            self._levels.append(tuple(level[part] for level in encoded.levels))
            self._num_placed += to - from_

    def pictures(self, device: torch.device, *, sees_both_ways: bool) -> StepPictures:
        """The pictures collected, on the device."""
        rotations = torch.from_numpy(self._rotations).to(device) if self._rotates else None
        return StepPictures(
            rotations,
            torch.from_numpy(self._rows).to(device),
            torch.cat(self._embeddings) if self._embeddings else None,
            tuple(torch.cat(level) for level in zip(*self._levels, strict=True)),
            tuple(self._ranges) if sees_both_ways else (),
        )
