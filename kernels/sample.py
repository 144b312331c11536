# mypy: disable-error-code="untyped-decorator"
"""Logits to tokens, each row by its slot's parameters, without a word to the host.

    logits [R, V], slots [R], slot_state [S, NUM_FIELDS], token_rows [S, L], num_steps [1]
      ->  a token per row behind the slot's known ones, and into its column of the output ring

Greedy rows take the first of the largest logits. Others keep what min-p, then top-k (ties at its
bar stay together), then top-p (of equals the lower ids first) let pass, and run a race among them:
the largest sum of scaled logit and a number that is a pure function of seed, output position and
token. No row is sorted: bars are found by halving the interval of the logits' own bits, 16 for a
16-bit type. A row's token depends on nothing but the row. Logits that are not finite give -1; a
negative slot gives nothing.
"""

import torch
import triton
import triton.language as tl

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
_TILE = 32768  # a pass over a vocabulary is a chain of a few loads, each of many words


def output_ring(max_num_rows: int, device: torch.device) -> torch.Tensor:
    """Where a device writes tokens, [RING, max_num_rows]: in the host's memory."""
    is_shared = device.type == "cuda"
    return torch.zeros((RING, max_num_rows), dtype=torch.int32, pin_memory=is_shared)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    slot_state: torch.Tensor,
    token_rows: torch.Tensor,
    num_steps: torch.Tensor,
    ring: torch.Tensor,
    all_greedy: bool,
) -> None:
    """Choose the tokens of step `num_steps`: ring row `num_steps % RING` gets them in row order.

    `all_greedy` promises that every row is greedy. A token is written to its token row as well and
    counted in `slot_state`; one that is -1 as token 0.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or slots.shape != (num_rows,) or slots.dtype != torch.int32:
        raise ValueError(f"logits {tuple(logits.shape)} and {slots.dtype} slots {slots.shape}")
    if slot_state.shape[1] != NUM_FIELDS.value or slot_state.dtype != torch.int64:
        raise ValueError(f"slot_state must be int64 [S, {NUM_FIELDS.value}]")
    if not token_rows.dtype == num_steps.dtype == ring.dtype == torch.int32:
        raise TypeError("token_rows, num_steps and ring must be int32")
    if ring.shape[0] != RING or ring.shape[1] < num_rows:
        raise ValueError(f"ring of {tuple(ring.shape)} for {num_rows} rows")
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(vocab_size, _SCAN_TILE)
    peaks = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    _scan_kernel[(num_rows, num_tiles)](
        logits, peaks, peak_ids, logits.stride(0), vocab_size, num_tiles,
        TILE=_SCAN_TILE, num_warps=8,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        logits, peaks, peak_ids, slots, slot_state, token_rows, num_steps, ring,
        logits.stride(0), token_rows.shape[1], ring.shape[1], vocab_size, num_tiles,
        RING_LEN=RING,
        NUM_TILES=triton.next_power_of_2(num_tiles),
        TILE=min(_TILE, triton.next_power_of_2(vocab_size)),
        ALL_GREEDY=all_greedy,
        num_warps=4 if all_greedy else 32,
    )  # fmt: skip


@triton.jit
def _scan_kernel(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    peak_ids_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The first largest logit of one tile; NaN if one of them is not finite."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    x = tl.load(logits_ptr + row * stride_row + ids, mask=inside, other=0.0).to(tl.float32)
    num_finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0)  # NaN compares false
    x = tl.where(inside, x, float("-inf"))
    peak, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    peak = tl.where(num_finite < TILE, float("nan"), peak)
    tl.store(peaks_ptr + row * num_tiles + tile, peak)
    tl.store(peak_ids_ptr + row * num_tiles + tile, tile * TILE + at)


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    peak_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_tokens: tl.tensor,
    stride_ring: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    RING_LEN: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        tiles = tl.arange(0, NUM_TILES)
        exists = tiles < num_tiles
        peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=exists, other=float("-inf"))
        peak_ids = tl.load(peak_ids_ptr + row * num_tiles + tiles, mask=exists, other=0)
        is_finite = tl.sum((peaks != peaks).to(tl.int32), 0) == 0
        peak = tl.max(peaks, 0)
        token = tl.min(tl.where(peaks == peak, peak_ids, vocab_size), 0)
        state = state_ptr + slot * NUM_FIELDS
        num_tokens = tl.load(state + NUM_TOKENS)
        if not ALL_GREEDY:
            temperature = tl.load(state + TEMPERATURE).to(tl.int32).to(tl.float32, bitcast=True)
            if is_finite & (temperature >= GREEDY_TEMPERATURE):
                position = num_tokens - tl.load(state + NUM_PROMPT)
                token = _draw(
                    logits_ptr + row * stride_row, vocab_size, peak, 1.0 / temperature,
                    tl.load(state + TOP_K).to(tl.int32),
                    tl.load(state + TOP_P).to(tl.int32).to(tl.float32, bitcast=True),
                    tl.load(state + MIN_P).to(tl.int32).to(tl.float32, bitcast=True),
                    _race_key(tl.load(state + SEED), position), TILE,
                )  # fmt: skip
        at = (tl.load(num_steps_ptr) % RING_LEN) * stride_ring + row
        tl.store(ring_ptr + at, tl.where(is_finite, token, -1))
        known = tl.where(is_finite, token, 0)
        tl.store(token_rows_ptr + slot * stride_tokens + num_tokens, known)
        tl.store(state + NUM_TOKENS, num_tokens + 1)


@triton.jit
def _draw(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    race: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The winner of a race among the kept."""
    lowest, highest = _key_range(x_ptr)
    bar = lowest  # the lowest key kept
    if top_k > 0:
        end = highest
        while end - bar > 1:
            middle = bar + (end - bar) // 2
            count = _count(x_ptr, vocab_size, middle, TILE)
            if count >= top_k:
                bar = middle
            else:
                end = middle
            if count == top_k:
                end = bar + 1
    num_ties = vocab_size  # how many of the tokens at the bar are kept
    if top_p < 1.0:
        target = top_p * _mass(x_ptr, vocab_size, peak, sharpness, bar, min_p, TILE)
        end = highest
        while end - bar > 1:
            middle = bar + (end - bar) // 2
            if _mass(x_ptr, vocab_size, peak, sharpness, middle, min_p, TILE) >= target:
                bar = middle
            else:
                end = middle
        above = _mass(x_ptr, vocab_size, peak, sharpness, bar + 1, min_p, TILE)
        weight = _weight_at(x_ptr, vocab_size, peak, sharpness, bar, TILE)
        num_ties = tl.maximum(1, tl.ceil((target - above) / weight).to(tl.int32))
    return _race(
        x_ptr, vocab_size, peak, sharpness, bar, min_p, num_ties, race, TILE
    )  # fmt: skip


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats."""
    WIDTH: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True).to(tl.int32)
    return bits ^ ((bits >> 31) & (2 ** (WIDTH - 1) - 1))


@triton.jit
def _key_range(x_ptr: tl.tensor) -> tl.tensor:
    """(no key is lower, no finite key is as high), so wide that halving cannot overflow."""
    HALF: tl.constexpr = 2 ** (x_ptr.dtype.element_ty.primitive_bitwidth - 1)
    return tl.full([], -HALF, tl.int64), tl.full([], HALF - 1, tl.int64)


@triton.jit
def _load(x_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.load(x_ptr + ids, mask=ids < vocab_size, other=float("-inf"))


@triton.jit
def _weights(x: tl.tensor, peak: tl.tensor, sharpness: tl.tensor) -> tl.tensor:
    return tl.exp((x.to(tl.float32) - peak) * sharpness)


@triton.jit
def _count(
    x_ptr: tl.tensor, vocab_size: tl.tensor, bar: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    total = tl.zeros([TILE], tl.int32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = _load(x_ptr, ids, vocab_size)
        total += ((_key(x) >= bar) & (ids < vocab_size)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    min_p: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The weight of all that reach both bars; summed in one order, so a higher bar never adds."""
    total = tl.zeros([TILE], tl.float32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        x = _load(x_ptr, first + tl.arange(0, TILE), vocab_size)
        weights = _weights(x, peak, sharpness)
        total += tl.where((_key(x) >= bar) & (weights >= min_p), weights, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _weight_at(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The weight of a token at the bar, or of the lightest above it."""
    lightest = tl.full([TILE], 1.0, tl.float32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        x = _load(x_ptr, first + tl.arange(0, TILE), vocab_size)
        weights = _weights(x, peak, sharpness)
        lightest = tl.minimum(lightest, tl.where(_key(x) >= bar, weights, 1.0))
    return tl.min(lightest, 0)


@triton.jit
def _race(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    min_p: tl.tensor,
    num_ties: tl.tensor,
    race: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The kept token with the largest sum of scaled logit and its own number."""
    bar = bar.to(tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = _load(x_ptr, ids, vocab_size)
        key = _key(x)
        is_tie = (key == bar).to(tl.int32)
        rank = ties_before + tl.cumsum(is_tie, 0)  # from 1 on at the ties
        kept = (key > bar) | ((is_tie > 0) & (rank <= num_ties))
        kept = kept & (_weights(x, peak, sharpness) >= min_p) & (ids < vocab_size)
        scores = (x.to(tl.float32) - peak) * sharpness + _race_numbers(race, ids)
        scores = tl.where(kept, scores, float("-inf"))
        score, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(score > best, first + at, token)
        best = tl.maximum(best, score)
        ties_before += tl.sum(is_tie, 0)
    return token


@triton.jit
def _race_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`worker_svc.random_numbers.race_keys`, bit for bit."""
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return _mix(_mix(seed.to(tl.uint64) + gamma) + (position + 1).to(tl.uint64) * gamma)


@triton.jit
def _race_numbers(race: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """`worker_svc.random_numbers.race_numbers`: the same bits, then the same formula."""
    bits = ids.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + race.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    bits = bits ^ (race >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    bits = bits ^ (bits >> 16)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)
