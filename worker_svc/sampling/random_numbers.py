"""Gumbel noise as a pure function of (seed, output position, token).

Sampling is Gumbel-max: every token gets its own noise, and the token with the largest sum of scaled
logit and noise is chosen, which samples exactly from the softmax. The noise comes from mixing
hashes in integer operations that give the same bits on every device, so a batch, a slot, a
preemption or a restart cannot change a request's tokens. One number per row and an inverted
distribution would cost less, but then the whole row's rounding decides between neighbours: where
probabilities are nearly flat, a last bit that differs between two batches changes the token. With
Gumbel noise this needs two leaders that are equal up to that bit.
"""

from torch import Tensor


def _signed(bits: int) -> int:
    """The int64 with the same bits: torch multiplies those, modulo 2**64."""
    return bits - (1 << 64) if bits >> 63 else bits


# Constants of the splitmix64 generator.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
# Odd constants of 32-bit mixing, as int32.
_STRIDE = 0x9E3779B1 - (1 << 32)
_MULTIPLIER_3 = 0x85EBCA6B - (1 << 32)
_MULTIPLIER_4 = 0xC2B2AE35 - (1 << 32)


def race_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Noise keys of rows: 64 hashed bits as int64 [R], of seeds and output positions int64 [R].

    The seed is mixed before the position is added: seeds that differ by little, or by the
    position's own stride, then share no noise.
    """
    return _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)


def race_numbers(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise float32 [R, N] of the tokens [N] or [R, N] int32 for keys [R] int64."""
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]  # [R, 1] each
    bits = token_ids * _STRIDE + low
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _MULTIPLIER_3
    bits ^= high
    bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
    bits *= _MULTIPLIER_4
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    # The centers of 2**23 equal parts of (0, 1): float32 holds each exactly, without the ends.
    uniform = ((bits >> 9).bitwise_and_(0x7FFFFF).float() + 0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit down; the mask removes the copies.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
