# mypy: disable-error-code="untyped-decorator"
"""Samples tokens with the parameters of each row's slot, without the host.

    logits [R, N], slots [R], slot_state [S, NUM_FIELDS]  ->  candidates [2, R, T]
    candidates [P, 2, R, T], slots [R], slot_state, token_rows [S, L], num_steps [1]
      ->  appends a token to each row's slot and writes it to the row's column of the output ring
    candidates [P, 2, R, T]  ->  tokens [R], no slot changes

The vocabulary is in P parts, one per rank, each cut into T tiles. The candidate of a tile is its
best token with that token's score, both float64. The score of a greedy row is the logit; that of an
unfiltered row is the scaled logit plus Gumbel noise, a pure function of seed, output position and
token, so it is equal in any part. The row's token is the best of all candidates, the lowest one if
equal. For filtered rows the candidates are the largest logits, which
`kernels/sampling/filtered_draw.py` then replaces by the drawn token. Rows with logits that are not
finite give -1; rows with a negative slot are skipped.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.sampling.gumbel import gumbel_noise, noise_key
from kernels.sampling.slot_state import (
    GREEDY_TEMPERATURE,
    NUM_FIELDS,
    NUM_PROMPT,
    NUM_TOKENS,
    SEED,
    TEMPERATURE,
    filtering_temperature,
    load_float,
)

# Number of steps in the ring; more than can be in flight.
RING = 4
_STEP = 2048  # logits per iteration of a program
MAX_TILES = 128  # per part of a row
_MANY_TILES = 2048
_WIDEST_TILE = 16384


@dataclass(frozen=True, slots=True)
class Tokens:
    """Destination of tokens: their slots, and the ring in row order."""

    slot_state: torch.Tensor  # [S, NUM_FIELDS] int64, its token counts grow
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
    """A ring [RING, max_num_rows] in host memory that the device can write."""
    is_shared = device.type == "cuda"
    return torch.zeros((RING, max_num_rows), dtype=torch.int32, pin_memory=is_shared)


def find_candidates(
    logits: torch.Tensor, slots: torch.Tensor, slot_state: torch.Tensor, first_token: int = 0
) -> torch.Tensor:
    """Best token and score of each tile, [2, R, T] float64; NaN if a logit is not finite.

    The logits are of consecutive tokens from `first_token` on.
    """
    num_rows, width = logits.shape
    if logits.stride(1) != 1 or slots.shape != (num_rows,) or slots.dtype != torch.int32:
        raise ValueError(f"logits {tuple(logits.shape)} and {slots.dtype} slots {slots.shape}")
    steps = _steps_of_a_tile(num_rows, width)
    num_tiles = triton.cdiv(width, steps * _STEP)
    found = torch.empty((2, num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    if num_rows:
        _find_kernel[(num_rows, num_tiles)](
            logits, slots, slot_state, found, logits.stride(0), width, steps, first_token,
            STEP=_STEP, PDL=has_pdl(logits), num_warps=8, **launch_options(logits),
        )  # fmt: skip
    return found


def _steps_of_a_tile(num_rows: int, width: int) -> int:
    """Iterations per tile, for enough tiles to fill a device and no more."""
    tile_width = min(num_rows * width // _MANY_TILES, _WIDEST_TILE)
    steps: int = triton.cdiv(max(tile_width, triton.cdiv(width, MAX_TILES)), _STEP)
    return steps


def choose(candidates: torch.Tensor, slots: torch.Tensor, into: Tokens) -> None:
    """Writes each row's token to its slot and the ring; -1 is stored in the slot as token 0."""
    num_parts, _, num_rows, num_tiles = candidates.shape
    if num_tiles > MAX_TILES:
        raise ValueError(f"{num_tiles} tiles of a part, at most {MAX_TILES}")
    if candidates.dtype != torch.float64 or not candidates.is_contiguous():
        raise ValueError(f"candidates must be contiguous float64, not {candidates.dtype}")
    if slots.shape != (num_rows,) or slots.dtype != torch.int32 or into.ring.shape[1] < num_rows:
        raise ValueError(f"{num_rows} rows for {slots.dtype} slots {slots.shape} and {into.ring=}")
    if num_rows == 0:
        return
    _choose_kernel[(num_rows,)](
        candidates, slots, into.slot_state, into.token_rows, into.num_steps, into.ring,
        into.token_rows.shape[1], into.ring.shape[1], num_parts, num_tiles,
        RING_LEN=RING,
        NUM_CANDIDATES=MAX_TILES * triton.next_power_of_2(num_parts),
        PDL=has_pdl(candidates),
        num_warps=1,
        **launch_options(candidates),
    )  # fmt: skip


def best_tokens(candidates: torch.Tensor) -> torch.Tensor:
    """Each row's token [R] int32, as `choose` takes it; -1 if its logits are not finite."""
    scores, tokens = candidates.unbind(1)  # [P, R, T]
    best = scores.amax((0, 2))  # NaN if one is
    is_best = scores == best[:, None]
    token = tokens.masked_fill(~is_best, float("inf")).amin((0, 2))
    return token.masked_fill_(best.isnan(), -1).int()


@triton.jit(do_not_specialize=["steps", "first_token"])
def _find_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    found_ptr: tl.tensor,
    stride_row: tl.tensor,
    width: tl.tensor,
    steps: tl.tensor,
    first_token: tl.tensor,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Computes the candidate of one tile."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        x_ptr = logits_ptr + row * stride_row
        state = state_ptr + slot * NUM_FIELDS
        temperature = load_float(state + TEMPERATURE)
        if (temperature < GREEDY_TEMPERATURE) | (filtering_temperature(state) > 0.0):
            score, token = _find_largest(x_ptr, width, tile * steps, steps, first_token, STEP)
        else:
            position = tl.load(state + NUM_TOKENS) - tl.load(state + NUM_PROMPT)
            row_key = noise_key(tl.load(state + SEED), position)
            score, token = _find_winner(
                x_ptr, width, tile * steps, steps, first_token, temperature, row_key, STEP
            )  # fmt: skip
        num_tiles = tl.num_programs(1)
        found = found_ptr + row * num_tiles + tile
        tl.store(found, score)
        tl.store(found + tl.num_programs(0) * num_tiles, token)


@triton.jit
def _find_largest(
    x_ptr: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    steps: tl.tensor,
    first_token: tl.tensor,
    STEP: tl.constexpr,
) -> tl.tensor:
    """(largest logit, or NaN if one is not finite; its token), both float64."""
    best = tl.full([STEP], float("-inf"), tl.float32)  # per lane
    at = tl.zeros([STEP], tl.int32)
    is_good = tl.full([STEP], 1, tl.int1)  # whether a lane's logits are finite
    for step in tl.range(begin, begin + steps, num_stages=3):
        i = step * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + i, mask=i < width, other=0.0).to(tl.float32)
        is_good = is_good & (tl.abs(x) < float("inf"))  # NaN compares false
        is_better = (x > best) & (i < width)
        best = tl.where(is_better, x, best)
        at = tl.where(is_better, i, at)
    return _first_best(tl.where(is_good, best, float("nan")).to(tl.float64), first_token + at)


@triton.jit
def _find_winner(
    x_ptr: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    steps: tl.tensor,
    first_token: tl.tensor,
    temperature: tl.tensor,
    row_key: tl.tensor,
    STEP: tl.constexpr,
) -> tl.tensor:
    """(largest sum of scaled logit and Gumbel noise, NaN if a logit is not finite; its token).

    The row's largest logit is unknown in a part, so it is not subtracted. float64 keeps the noise
    exact next to a logit that a low temperature makes huge.
    """
    sharpness = 1.0 / temperature.to(tl.float64)
    best = tl.full([STEP], float("-inf"), tl.float64)
    at = tl.zeros([STEP], tl.int32)
    is_good = tl.full([STEP], 1, tl.int1)
    for step in tl.range(begin, begin + steps, num_stages=3):
        i = step * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + i, mask=i < width, other=0.0).to(tl.float32)
        is_good = is_good & (tl.abs(x) < float("inf"))  # NaN compares false
        score = x.to(tl.float64) * sharpness
        score += gumbel_noise(row_key, first_token + i).to(tl.float64)
        is_better = (score > best) & (i < width)
        best = tl.where(is_better, score, best)
        at = tl.where(is_better, i, at)
    return _first_best(tl.where(is_good, best, float("nan")), first_token + at)


@triton.jit
def _first_best(scores: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """(best score, or NaN if one is NaN; the lowest token with that score, as float64)."""
    num_bad = tl.sum((scores != scores).to(tl.int32), 0)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), 0)
    return tl.where(num_bad > 0, float("nan"), best), token.to(tl.float64)


@triton.jit(do_not_specialize=["num_parts", "num_tiles"])
def _choose_kernel(
    found_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    stride_tokens: tl.tensor,
    stride_ring: tl.tensor,
    num_parts: tl.tensor,
    num_tiles: tl.tensor,
    RING_LEN: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        part_size = tl.num_programs(0) * num_tiles
        i = tl.arange(0, NUM_CANDIDATES)
        exists = i < num_parts * num_tiles
        found = found_ptr + i // num_tiles * 2 * part_size + row * num_tiles + i % num_tiles
        scores = tl.load(found, mask=exists, other=float("-inf"))
        tokens = tl.load(found + part_size, mask=exists, other=0.0).to(tl.int32)
        best, token = _first_best(scores, tokens)
        is_finite = best == best
        token = token.to(tl.int32)
        state = state_ptr + slot * NUM_FIELDS
        num_tokens = tl.load(state + NUM_TOKENS)
        at = (tl.load(num_steps_ptr) % RING_LEN) * stride_ring + row
        tl.store(ring_ptr + at, tl.where(is_finite, token, -1))
        known = tl.where(is_finite, token, 0)
        tl.store(token_rows_ptr + slot * stride_tokens + num_tokens, known)
        tl.store(state + NUM_TOKENS, num_tokens + 1)
