"""Gumbel noise as a pure function of (seed, output position, token).

Gumbel-max sampling adds independent Gumbel noise to each scaled logit and takes the argmax, which
is an exact sample from the softmax. The noise is a hash in integer operations with equal bits on
every device, so the batch, the slot, a preemption or a restart cannot change a request's tokens.
Inverting the cumulative distribution would need one random number per row, but rounding of the
whole row would then decide between neighbouring tokens: for nearly flat distributions, a last bit
that differs between two batches changes the token. With Gumbel noise it does so only if the two
largest scores are equal up to that bit.
"""

from torch import Tensor


def _signed(bits: int) -> int:
    """Returns the int64 with the same bits: torch multiplies int64 modulo 2**64."""
    return bits - (1 << 64) if bits >> 63 else bits


# Constants of the splitmix64 generator.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
# Odd multipliers of the 32-bit hash, as int32.
_STRIDE = 0x9E3779B1 - (1 << 32)
_MULTIPLIER_3 = 0x85EBCA6B - (1 << 32)
_MULTIPLIER_4 = 0xC2B2AE35 - (1 << 32)


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Noise keys int64 [R]: 64 hashed bits of seeds and output positions, both int64 [R].

    The seed is hashed before the position is added, so that seeds which differ by little, or by a
    multiple of _GAMMA, do not share noise at shifted positions.
    """
    return _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise float32 [R, N] for keys int64 [R] and tokens int32 [N] or [R, N]."""
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]  # [R, 1] each
    bits = token_ids * _STRIDE + low
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _MULTIPLIER_3
    bits ^= high
    bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
    bits *= _MULTIPLIER_4
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    # Centers of 2**23 equal parts of (0, 1): exact in float32, and never 0 or 1.
    uniform = ((bits >> 9).bitwise_and_(0x7FFFFF).float() + 0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # int64 shifts are arithmetic; the mask removes the copies of the sign bit.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
