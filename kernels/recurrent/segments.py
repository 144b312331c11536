"""The tokens of a step and the rows of a state memory that they update, for kernels in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of a prompt that a kernel computes together.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """The places of S segments among a step's T tokens, in order and without common tokens."""

    begin: Tensor  # [S] int32
    end: Tensor  # [S] int32; a segment without tokens is padding
    of_chunk: Tensor  # [C] int32: the segment of a chunk, if the segment is long enough to have it

    @classmethod
    def of(cls, begin: Tensor, end: Tensor, num_tokens: int) -> "Bounds":
        """Bounds with a table of chunks, made without waiting for the device.

        The chunks of segment s are numbered from begin[s] // CHUNK + s, so no two are equal.
        """
        num_segments, device = len(begin), begin.device
        starts = begin // CHUNK + torch.arange(num_segments, dtype=torch.int32, device=device)
        num_chunks = num_tokens // CHUNK + num_segments
        chunks = torch.arange(num_chunks, dtype=torch.int32, device=device)
        found = torch.searchsorted(starts, chunks, right=True, out_int32=True) - 1
        return cls(begin, end, found.clamp_(min=0))

    @property
    def num_chunks(self) -> int:
        """The most chunks that the segments can have."""
        return len(self.of_chunk)


@dataclass(frozen=True, slots=True)
class Segments:
    """S runs of tokens of different sequences, and the rows of their states.

    Tensors begin at multiples of 16 bytes, so that one compilation of a kernel serves all steps.

    No row that is written is read, and none is written twice, but for rows of padding, whose
    outputs nothing looks at.
    """

    before: Tensor  # [S] int64, the rows to be read
    after: Tensor  # [S] int64, the rows to be written
    is_first: Tensor  # [S] bool: the states before are zeros, whatever the row holds
    bounds: Bounds | None = None  # None: segment i is token i

    def __len__(self) -> int:
        return len(self.before)

    @property
    def begin(self) -> Tensor | None:
        """The first token of each segment [S]; None: see `bounds`."""
        return None if self.bounds is None else self.bounds.begin

    @property
    def end(self) -> Tensor | None:
        """The token after each segment [S]; None: see `bounds`."""
        return None if self.bounds is None else self.bounds.end


def check_rows(states: Tensor, shape: tuple[int, ...], alignment: int = 1) -> None:
    """Raises ValueError unless states [R, *shape] have dense rows that begin at such multiples."""
    if states.shape[1:] != shape or not states[0].is_contiguous():
        raise ValueError(f"states must have dense rows {shape}, got {tuple(states.shape)}")
    if states.stride(0) % alignment:
        raise ValueError(f"rows of states begin at multiples of {states.stride(0)} elements")
