# mypy: disable-error-code="untyped-decorator"
"""Logits to tokens, each row by its slot's parameters, without a word to the host.

    logits [R, N], slots [R], slot_state [S, NUM_FIELDS]  ->  candidates [2, R, T]
    candidates [P, 2, R, T], slots [R], slot_state, token_rows [S, L], num_steps [1]
      ->  a token per row behind the slot's known ones, and into its column of the output ring

The vocabulary may be in P parts, one to a rank, each cut into T tiles. A tile's candidate is its
best token and that token's score, both float64: greedy rows score by logit, and rows that filter
nothing by what wins a race, the sum of scaled logit and a number that is a pure function of seed,
output position and token. So a token's score is the same in whatever part it is found, and the best
of all candidates, of equals the lowest token, is the row's token. A row that filters needs all its
logits (`kernels/filtered_draw.py`), and the largest of them, which is what its candidates are.
Logits that are not finite give -1; a negative slot gives nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.filtered_draw import draw_filtered
from kernels.race import race_key, race_numbers
from kernels.slot_state import (
    MIN_P,
    NUM_FIELDS,
    NUM_PROMPT,
    NUM_TOKENS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

# Below this a temperature counts as 0.
GREEDY_TEMPERATURE = tl.constexpr(1e-5)
# Steps whose tokens the ring holds; more than may be in flight.
RING = 4
_SCAN_TILE = 4096
_FILTER_TILE = 32768  # a pass over a vocabulary is a chain of a few loads, each of many words


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where tokens go: to their slots, and to the ring in the order of the rows."""

    slot_state: torch.Tensor  # [S, NUM_FIELDS] int64, whose count of known tokens grows
    token_rows: torch.Tensor  # [S, L] int32
    num_steps: torch.Tensor  # [1] int32: ring row `num_steps % RING`
    ring: torch.Tensor  # [RING, max_num_rows] int32

    def __post_init__(self) -> None:
        if self.slot_state.shape[1] != NUM_FIELDS.value or self.slot_state.dtype != torch.int64:
            raise ValueError(f"slot_state must be int64 [S, {NUM_FIELDS.value}]")
        if not self.token_rows.dtype == self.num_steps.dtype == self.ring.dtype == torch.int32:
            raise TypeError("token_rows, num_steps and ring must be int32")
        if self.ring.shape[0] != RING:
            raise ValueError(f"ring of {tuple(self.ring.shape)}, not [{RING}, max_num_rows]")


def output_ring(max_num_rows: int, device: torch.device) -> torch.Tensor:
    """Where a device writes tokens, [RING, max_num_rows]: in the host's memory."""
    is_shared = device.type == "cuda"
    return torch.zeros((RING, max_num_rows), dtype=torch.int32, pin_memory=is_shared)


def find_candidates(
    logits: torch.Tensor, slots: torch.Tensor, slot_state: torch.Tensor, first_token: int = 0
) -> torch.Tensor:
    """Scores and tokens [2, R, T] float64 of each tile's best; NaN for one that is not finite.

    Logits are of consecutive tokens from `first_token` on.
    """
    num_rows, width = logits.shape
    if logits.stride(1) != 1 or slots.shape != (num_rows,) or slots.dtype != torch.int32:
        raise ValueError(f"logits {tuple(logits.shape)} and {slots.dtype} slots {slots.shape}")
    num_tiles = triton.cdiv(width, _SCAN_TILE)
    found = torch.empty((2, num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    if num_rows:
        _find_kernel[(num_rows, num_tiles)](
            logits, slots, slot_state, found, logits.stride(0), width, first_token,
            TILE=_SCAN_TILE, num_warps=8,
        )  # fmt: skip
    return found


def choose(
    candidates: torch.Tensor,
    slots: torch.Tensor,
    into: Tokens,
    filtered: torch.Tensor | None = None,
) -> None:
    """Writes the token of every row, one that is -1 as token 0 to its slot, and counts it there.

    Rows that filter need the logits [R, V] `filtered`, and candidates of one part. Without them
    the caller promises that no row does.
    """
    num_parts, _, num_rows, num_tiles = candidates.shape
    if candidates.dtype != torch.float64 or not candidates.is_contiguous():
        raise ValueError(f"candidates must be contiguous float64, not {candidates.dtype}")
    if slots.shape != (num_rows,) or slots.dtype != torch.int32 or into.ring.shape[1] < num_rows:
        raise ValueError(f"{num_rows} rows for {slots.dtype} slots {slots.shape} and {into.ring=}")
    if filtered is not None and (num_parts > 1 or filtered.stride(1) != 1):
        raise ValueError(f"filters look at whole rows, not at {num_parts} parts")
    if num_rows == 0:
        return
    vocab_size = 0 if filtered is None else filtered.shape[1]
    _choose_kernel[(num_rows,)](
        candidates, filtered, slots, into.slot_state, into.token_rows, into.num_steps, into.ring,
        0 if filtered is None else filtered.stride(0),
        into.token_rows.shape[1], into.ring.shape[1], vocab_size, num_parts, num_tiles,
        RING_LEN=RING,
        NUM_CANDIDATES=triton.next_power_of_2(num_parts * num_tiles),
        FILTER_TILE=min(_FILTER_TILE, triton.next_power_of_2(vocab_size)) if vocab_size else 0,
        num_warps=32 if vocab_size else 1,
    )  # fmt: skip


@triton.jit
def _find_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    found_ptr: tl.tensor,
    stride_row: tl.tensor,
    width: tl.tensor,
    first_token: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The candidate of one tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < width
        x = tl.load(logits_ptr + row * stride_row + at, mask=inside, other=0.0).to(tl.float32)
        num_finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0)  # NaN compares false
        x = tl.where(inside, x, float("-inf"))
        state = state_ptr + slot * NUM_FIELDS
        temperature = tl.load(state + TEMPERATURE).to(tl.int32).to(tl.float32, bitcast=True)
        if (temperature < GREEDY_TEMPERATURE) | _filters(state):
            peak, best = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
            score = peak.to(tl.float64)
        else:
            position = tl.load(state + NUM_TOKENS) - tl.load(state + NUM_PROMPT)
            race = race_key(tl.load(state + SEED), position)
            # No part knows the row's largest logit, so it cannot be subtracted. float64 keeps the
            # numbers whole beside a logit that a low temperature makes huge.
            sharpness = 1.0 / temperature.to(tl.float64)
            scores = x.to(tl.float64) * sharpness
            scores += race_numbers(race, first_token + at).to(tl.float64)
            score, best = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        score = tl.where(num_finite < TILE, float("nan"), score)
        num_rows, num_tiles = tl.num_programs(0), tl.num_programs(1)
        found = found_ptr + row * num_tiles + tile
        tl.store(found, score)
        tl.store(found + num_rows * num_tiles, (first_token + tile * TILE + best).to(tl.float64))


@triton.jit
def _filters(state: tl.tensor) -> tl.tensor:
    """Whether a slot's parameters take tokens out of its race."""
    top_p = tl.load(state + TOP_P).to(tl.int32).to(tl.float32, bitcast=True)
    min_p = tl.load(state + MIN_P).to(tl.int32).to(tl.float32, bitcast=True)
    return (tl.load(state + TOP_K) > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _choose_kernel(
    found_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_tokens: tl.tensor,
    stride_ring: tl.tensor,
    vocab_size: tl.tensor,
    num_parts: tl.tensor,
    num_tiles: tl.tensor,
    RING_LEN: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    FILTER_TILE: tl.constexpr,  # 0: no row filters
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        part_size = tl.num_programs(0) * num_tiles
        i = tl.arange(0, NUM_CANDIDATES)
        exists = i < num_parts * num_tiles
        found = found_ptr + i // num_tiles * 2 * part_size + row * num_tiles + i % num_tiles
        scores = tl.load(found, mask=exists, other=float("-inf"))
        tokens = tl.load(found + part_size, mask=exists, other=0.0).to(tl.int32)
        is_finite = tl.sum((scores != scores).to(tl.int32), 0) == 0
        best = tl.max(scores, 0)
        token = tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), 0)
        state = state_ptr + slot * NUM_FIELDS
        num_tokens = tl.load(state + NUM_TOKENS)
        if FILTER_TILE > 0:
            temperature = tl.load(state + TEMPERATURE).to(tl.int32).to(tl.float32, bitcast=True)
            if is_finite & (temperature >= GREEDY_TEMPERATURE) & _filters(state):
                position = num_tokens - tl.load(state + NUM_PROMPT)
                token = draw_filtered(
                    logits_ptr + row * stride_row, vocab_size, best.to(tl.float32),
                    1.0 / temperature,
                    tl.load(state + TOP_K).to(tl.int32),
                    tl.load(state + TOP_P).to(tl.int32).to(tl.float32, bitcast=True),
                    tl.load(state + MIN_P).to(tl.int32).to(tl.float32, bitcast=True),
                    race_key(tl.load(state + SEED), position), FILTER_TILE,
                )  # fmt: skip
        at = (tl.load(num_steps_ptr) % RING_LEN) * stride_ring + row
        tl.store(ring_ptr + at, tl.where(is_finite, token, -1))
        known = tl.where(is_finite, token, 0)
        tl.store(token_rows_ptr + slot * stride_tokens + num_tokens, known)
        tl.store(state + NUM_TOKENS, num_tokens + 1)
