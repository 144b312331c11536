"""Pictures in prompts, as layers see them: in place of the embeddings of their placeholders.

A picture's tokens may be rotated by their place in the picture: by time, height and width in place
of one position (M-RoPE). Text after it goes on from the largest of these, so that positions of all
later tokens differ by a constant from their places in the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Grid = tuple[int, int, int]  # tokens in time, height and width
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """The encoder's output for a picture of N tokens."""

    content_id: bytes
    embeddings: Tensor  # [N, hidden]
    levels: tuple[Tensor, ...]  # [N, hidden] each: added to hidden states after the first layers
    grid: Grid | None  # None: its tokens have positions as text has

    @property
    def num_tokens(self) -> int:
        """Number of its placeholders."""
        return len(self.embeddings)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in (self.embeddings, *self.levels))


@dataclass(frozen=True, slots=True)
class SequencePictures:
    """The pictures of one sequence in a slot."""

    begins: tuple[int, ...]  # positions of their first placeholders, ascending
    ends: tuple[int, ...]
    encoded: tuple[EncodedPicture, ...]  # none once the prompt is computed
    rotations: Positions | None  # [3, prompt]; None: those of text

    @property
    def offset(self) -> int:
        """The number that positions of tokens after the prompt are ahead of their places."""
        if self.rotations is None:
            return 0
        return int(self.rotations[:, -1].max()) + 1 - int(self.rotations.shape[1])

    def rotations_of(self, begin: int, end: int) -> Positions:
        """The rotations [3, end - begin] of tokens from `begin` on."""
        places = np.arange(begin, end)
        if self.rotations is None:
            return np.broadcast_to(places, (3, end - begin))
        num_prompt = self.rotations.shape[1]
        after = places[places >= num_prompt] + self.offset
        return np.concatenate((self.rotations[:, begin:end], np.tile(after, (3, 1))), axis=1)


def rotations_of_prompt(num_tokens: int, begins: Sequence[int], grids: Sequence[Grid]) -> Positions:
    """The rotations [3, num_tokens] of a prompt, by time, height and width."""
    rotations = np.empty((3, num_tokens), dtype=np.int64)
    place = position = 0
    for begin, grid in zip(begins, grids, strict=True):
        num_before, size = begin - place, int(np.prod(grid))
        rotations[:, place:begin] = position + np.arange(num_before)
        position += num_before
        rotations[:, begin : begin + size] = position + np.indices(grid).reshape(3, size)
        position += max(grid)
        place = begin + size
    rotations[:, place:] = position + np.arange(num_tokens - place)
    return rotations


@dataclass(frozen=True, slots=True)
class StepPictures:
    """The pictures of a step of T tokens, of which N are placeholders."""

    rotations: Tensor | None  # [3, T] int64; None: positions are those of text
    rows: Tensor  # [T] int64: of each placeholder its row below; -1 elsewhere
    embeddings: Tensor | None  # [N, hidden]; None: N is 0
    levels: tuple[Tensor, ...]  # [N, hidden] each
    # Tokens of the step that see each other both ways: (first, after the last) of each picture.
    ranges: tuple[tuple[int, int], ...] = ()

    def of(self, tokens: Tensor) -> "StepPictures":
        """The same for some of the step's tokens, which see no later ones."""
        rotations = None if self.rotations is None else self.rotations[:, tokens]
        return StepPictures(rotations, self.rows[tokens], self.embeddings, self.levels)

    def placed(self, embedded: Tensor) -> Tensor:
        """Embeddings [T, hidden] with those of pictures in place of their placeholders'."""
        if self.embeddings is None:
            return embedded
        is_placeholder = (self.rows >= 0).unsqueeze(1)
        pictured = self.embeddings.index_select(0, self.rows.clamp(min=0))
        return torch.where(is_placeholder, pictured.to(embedded.dtype), embedded)

    def levels_of_tokens(self) -> tuple[Tensor, list[Tensor]] | None:
        """The placeholders [T] bool, and what is added to theirs after each of the first layers."""
        is_placeholder = self.rows >= 0
        if not self.levels or not bool(is_placeholder.any()):
            return None
        rows = self.rows[is_placeholder]
        return is_placeholder, [level.index_select(0, rows) for level in self.levels]
