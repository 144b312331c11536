"""Sequences whose states lie in rows of one memory, for kernels that update them in place."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kernels.recurrent.segments import Bounds, Segments

# (tokens of a sequence as slices of a step's inputs, its state in float64) -> outputs and state.
Reference = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
Update = Callable[[Tensor, Sequence[Segments]], Tensor]

# Relative distances. Compiled, products of float32 are in three parts of TF32, of float16 in one.
FLOAT32, FLOAT16 = (2e-5, 2e-3) if torch.cuda.is_available() else (2e-6, 2e-6)
BFLOAT16 = 2e-4  # products in two parts, which have 16 digits

# Sequences of one step: chunks of 64 that are not full, full and more than one, and padding.
LENGTHS = [1, 2, 0, 65, 64, 1, 130, 63]


@dataclass(frozen=True, slots=True)
class InRows:
    """Sequences in a step, with rows in shuffled order; every second one begins in it."""

    lengths: list[int]
    states: Tensor  # [2 B + 1, ...]; NaN where nothing may be read
    segments: Segments

    @classmethod
    def of(
        cls, lengths: list[int], shape: tuple[int, ...], device: torch.device, gap: int = 4
    ) -> "InRows":
        """Random states, in rows that are `gap` numbers apart."""
        count, size = len(lengths), math.prod(shape)
        memory = torch.full((2 * count + 1, size + gap), math.nan, device=device)
        states = memory[:, :size].view(-1, *shape)
        rows = torch.randperm(2 * count + 1)[: 2 * count].to(device)
        before, after = rows.chunk(2)
        is_first = torch.arange(count, device=device) % 2 == 1
        states[before] = torch.randn((count, *shape), device=device)
        states[before[is_first]] = math.nan
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        bounds = Bounds.of(ends[:-1], ends[1:], sum(lengths))
        if lengths == [1] * count:
            return cls(lengths, states, Segments(before, after, is_first))
        return cls(lengths, states, Segments(before, after, is_first, bounds))

    def check(
        self, update: Update, reference: Reference, close: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Compares outputs, the rows written, and all other rows, which are as they were."""
        states = self.states.clone()
        out = update(states, [self.segments])
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        for i, (begin, end) in enumerate(pairwise(starts)):
            if begin == end:
                continue
            before, after = self.segments.before[i], self.segments.after[i]
            state = self.states[before].double()
            if self.segments.is_first[i]:
                state = torch.zeros_like(state)
            y, state = reference(slice(begin, end), state)
            close(out[begin:end], y)
            close(states[after], state)
            states[after] = self.states[after]
        torch.testing.assert_close(states, self.states, rtol=0, atol=0, equal_nan=True)

    def check_cuts(self, update: Update) -> None:
        """The first sequence of the step cut anywhere is the whole one, whatever the others do."""
        (length, *_), bounds = self.lengths, self.segments.bounds
        after = self.segments.after
        assert bounds is not None
        whole = self.states.clone()
        expected = update(whole, [self.segments])
        spare = next(
            row
            for row in range(len(self.states))
            if row not in self.segments.before and row not in after
        )
        for cut in (1, 2, 63, 64, 65, length - 1):
            end, rows = bounds.end.clone(), after.clone()
            end[0], rows[0] = bounds.begin[0] + cut, spare
            num_tokens = sum(self.lengths)
            first = replace(
                self.segments, after=rows, bounds=Bounds.of(bounds.begin, end, num_tokens)
            )
            second = Segments(
                rows[:1].clone(),
                after[:1],
                torch.zeros_like(self.segments.is_first[:1]),
                Bounds.of(end[:1], bounds.end[:1], num_tokens),
            )
            states = self.states.clone()
            found = update(states, [first, second])
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(states[after[0]], whole[after[0]], rtol=2e-5, atol=2e-5)


def close_by(bound: float) -> Callable[[Tensor, Tensor], None]:
    """Asserts a relative distance."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape
        distance = float((actual.double() - expected).norm() / expected.norm())
        assert distance <= bound, f"off by {distance:.1e}"

    return check
